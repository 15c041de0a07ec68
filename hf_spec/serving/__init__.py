"""Additions of ``hf-spec serve`` to Transformers' server."""
