"""Parts that methods draft with: drafters, options, heads, n-gram lookups."""
