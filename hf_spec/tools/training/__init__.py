"""``distill`` generates training data, ``dataset`` reads it, ``train`` trains an adapter.

A training script of one's own takes these names; everything else is ``transformers.Trainer`` and
PEFT.
"""

from hf_spec.tools.training.anchors import AnswerDataset, collate
from hf_spec.tools.training.dataset import read_answers, split
from hf_spec.tools.training.vocabulary import set_vocabulary

__all__ = ["AnswerDataset", "collate", "read_answers", "set_vocabulary", "split"]
