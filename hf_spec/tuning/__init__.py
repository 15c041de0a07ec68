"""Search for good settings on the user's own prompts and machine.

``costs`` measures what forwards of the model cost, ``objective`` what a choice of sublayers is
worth, ``search`` optimises it in a study on disk, ``report`` puts the result into an adapter
folder, ``plots`` draws it.
"""
