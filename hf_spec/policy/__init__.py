"""How much to speculate: the only place that knows the clock."""
