"""Speculative decoding methods: one folder per method, and the registry."""
