"""Files that go into adapter repositories: the card's template and the custom_generate shim."""
