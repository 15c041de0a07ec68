"""Adapter repositories: their files, their cards, and uploads to the Hub.

``folder`` writes and checks adapter folders, ``card`` renders their ``README.md``, ``push`` uploads
them, and ``transfer`` reads published checkpoints and writes adapters for other programs.
"""
