"""Views of single steps: which step emitted which tokens, and the tree that a step verified.

``steps`` collects them while ``generate`` runs, ``plots`` draws them with matplotlib.
"""

from hf_spec.viewing.plots import plot_texts, plot_tree
from hf_spec.viewing.steps import StepStreamer, VerifiedTree, coloured, pieces

__all__ = ["StepStreamer", "VerifiedTree", "coloured", "pieces", "plot_texts", "plot_tree"]
