"""Offloading for clients that exist already; each needs an extra of its own."""
