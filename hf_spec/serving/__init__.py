"""What ``hf-spec serve`` adds to Transformers' server."""
