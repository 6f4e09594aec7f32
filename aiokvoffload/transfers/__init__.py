"""Moving bytes between GPU blocks and slots. `base.py` is one transfer, `worker.py` orders them."""
