"""Speculative decoding methods: one folder per method, and what they share."""
