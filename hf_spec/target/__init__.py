"""All that touches a model of Transformers: forwards, hidden states, recorded steps."""
