"""Adapter repositories and other programs: files, cards, uploads and conversions.

``folder`` writes and checks adapter folders, ``card`` renders their ``README.md`` and uploads them,
and ``transfer`` reads published checkpoints and writes adapters for other programs.
"""
