"""The demo: a shipped model with and without speculation."""
