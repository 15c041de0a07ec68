"""Speculation of hf_spec inside other engines; each module needs only its own engine."""
