"""Benchmark of strategies against plain ``generate``: same process, same prompts, in turns.

``prompts`` reads prompt files, ``runner`` measures, ``agreement`` compares outputs, ``report``
makes rows, table and ``results.json``, ``spec_bench`` writes Spec-Bench answer files.
"""
