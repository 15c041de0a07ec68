"""Generation of training data by the model itself, and training of adapters.

``distill`` generates answers, ``dataset`` reads them or the user's own data, ``train`` trains an
adapter.
"""
