"""Adapter repositories: what belongs into one, its card, and its way onto the Hub.

``folder`` writes and checks an adapter folder, ``card`` renders its ``README.md``, ``push`` uploads
it, ``transfer`` reads others' checkpoints and writes adapters for other programs.
"""
