"""Blocks in files of a directory that several processes may share. `tier.py` puts the parts together."""
