"""All that touches a model of Transformers: the tree forward, hidden states, whole sequences."""
