"""The decoding loop and its configuration."""
