"""Speculation of hf_spec inside other engines; each module needs its engine, and only then."""
