"""Adapter repositories and other programs: files, cards, uploads, conversions, and vLLM.

``folder`` writes and checks adapter folders, ``card`` renders their ``README.md``, ``push`` uploads
them, and ``transfer`` reads published checkpoints and writes adapters for other programs.
``vllm``, with ``lookups`` and ``requests``, is the proposer that vLLM loads; nothing imports it.
"""
