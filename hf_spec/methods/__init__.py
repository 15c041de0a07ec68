"""Speculative decoding methods: one module or small folder per method, and the registry."""
