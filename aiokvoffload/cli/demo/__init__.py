"""`aiokvoffload demo`: a small chat model whose prefixes are offloaded; `command.py` runs it."""
