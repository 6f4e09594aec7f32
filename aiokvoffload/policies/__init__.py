"""Eviction policies: who leaves first. `base.py` is the contract."""
