"""Released formats: what other programs call what an adapter has.

A format is a table of names of tensors, one of fields of ``config.json``, and what must hold; it is
read, and written where the other program can read it, from the same tables. Methods name what
reads and writes theirs.
"""
