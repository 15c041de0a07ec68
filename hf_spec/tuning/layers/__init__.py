"""``hf-spec search``: chooses the layers that drafting skips.

``costs`` measures the costs of forwards, ``objective`` evaluates a choice of sublayers, ``search``
optimises it in a ``study`` on disk, ``report`` writes the result to an adapter folder, ``plots``
draws it.
"""
