"""``hf-spec search``: chooses the layers that drafting skips."""
