"""Search for good settings on the user's own prompts and machine: layers to skip, and trees."""
