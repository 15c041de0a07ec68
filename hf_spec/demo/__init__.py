"""The demo: a shipped model with and without speculation, and views of its single steps."""
