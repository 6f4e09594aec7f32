"""What holds the engine's blocks: streams, events, copies. `base.py` is the contract."""
