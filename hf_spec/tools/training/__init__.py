"""``distill`` generates training data, ``dataset`` reads it, ``train`` trains an adapter."""
