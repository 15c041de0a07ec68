"""Tree, mask, cache, acceptance and statistics: tensors only, no model, no adapter, no I/O."""
