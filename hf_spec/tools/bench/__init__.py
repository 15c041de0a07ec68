"""Benchmark of strategies against plain ``generate``: same process, same prompts, in turns.

``contenders`` take part, ``prompts`` reads prompt files, ``runner`` measures, ``results`` compares
outputs and makes rows, table and ``results.json``.
"""
