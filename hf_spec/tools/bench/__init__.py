"""Benchmark of strategies against plain ``generate``: same process, same prompts, in turns.

``prompts`` reads prompt files, ``runner`` measures, ``agreement`` compares outputs, ``results``
and ``report`` make rows, table and ``results.json``.
"""
