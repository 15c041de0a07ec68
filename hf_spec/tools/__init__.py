"""What commands do: the library, all that runs in a call of ``generate()``, never imports it."""
