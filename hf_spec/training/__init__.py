"""Training data that a model makes for itself, and the training of adapters on it.

``distill`` generates the answers, ``dataset`` reads them or data of the user's own, ``train`` makes
an adapter of them.
"""
