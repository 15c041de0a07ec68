"""Released formats: what other programs call what an adapter has.

A format is a table of names of tensors, one of fields of ``config.json``, and what must hold; it is
read, and written where the other program can read it, from the same tables. A method names the
module of its formats, which has ``READERS``, :class:`~hf_spec.tools.formats.tables.Reader` by
method, and ``WRITERS``, :data:`~hf_spec.tools.formats.tables.Writer` by the format's name, or one
of the two.
"""
