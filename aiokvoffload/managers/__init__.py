"""Which key lives in which slot. `base.py` is the contract."""
