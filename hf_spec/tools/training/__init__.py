"""``distill`` generates training data, ``dataset`` reads it, ``train`` trains an adapter.

A training script of one's own takes these names; everything else is ``transformers.Trainer`` and
PEFT.
"""

from hf_spec.tools.training.dataset import (
    AnswerDataset,
    collate,
    read_answers,
    set_vocabulary,
    split,
)

__all__ = ["AnswerDataset", "collate", "read_answers", "set_vocabulary", "split"]
