"""Templates of files in adapter repositories: the card and the ``custom_generate`` shim."""
