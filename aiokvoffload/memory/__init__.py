"""Host memory in equal slots. `base.py` is the contract."""
