"""The command line; `main.py` runs it."""
