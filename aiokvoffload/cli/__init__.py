"""See base.py first."""
