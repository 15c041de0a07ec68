"""Everything that runs a Transformers model: tree forward, hidden states, whole sequences."""
