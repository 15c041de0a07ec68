"""Adapter repositories: what belongs into one, its card, and its way onto the Hub.

``folder`` writes and checks an adapter folder, ``card`` renders its ``README.md``, ``push`` uploads
it, ``command`` is ``hf-spec card`` and ``hf-spec push``.
"""
