"""Async offloading of LLM KV-cache blocks from GPU memory to CPU memory and below."""
