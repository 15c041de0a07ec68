"""``hf-spec search``: the layers that drafting leaves out.

``costs`` measures what forwards of the model cost, ``objective`` what a choice of sublayers is
worth, ``search`` optimises it in a ``study`` on disk, ``report`` puts the result into an adapter
folder, ``plots`` draws it.
"""
