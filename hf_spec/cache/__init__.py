"""The KV cache of trees, and its kinds of layers."""
