"""Storage below CPU memory, where every byte is checked and every wait is bounded. `base.py` is the contract."""
