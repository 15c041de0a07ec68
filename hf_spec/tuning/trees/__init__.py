"""``hf-spec tune``: the trees of an adapter for this device.

``future_ranks`` measures how often predictions are right, ``step_times`` what steps take,
``sparse_tree`` and ``bare_trees`` build trees of every size, ``tune`` chooses among them, ``plots``
draws them.
"""
