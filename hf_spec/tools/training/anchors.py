"""Turns answers into training batches: sequences, labels, and random anchors in the answers."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_spec.model.sequences import IGNORED


class AnswerDataset(Dataset[dict[str, Tensor]]):
    """Prompts with answers as training examples, with new random anchors in each epoch.

    An anchor is a token of the sequence that has probes; the tokens that these predict are in the
    answer. Anchors depend only on seed, epoch and example, so they are the same for any number of
    processes, and after an interruption.

    Args:
        rows: ``prompt_ids`` and ``answer_ids`` by index, such as a ``datasets.Dataset``.
        num_anchors: largest number of anchors per sequence.
        max_length: longer sequences are cut at the end; None for no limit.
        random: if False, anchors are evenly spaced and always the same.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Sequence[int]]], num_anchors: int = 64,
        max_length: int | None = None, seed: int = 0, random: bool = True,
    ):  # fmt: skip
        if num_anchors < 1:
            raise ValueError(f"num_anchors={num_anchors}: give at least 1.")
        self.rows, self.num_anchors, self.max_length = rows, num_anchors, max_length
        self.seed, self.random, self.epoch = seed, random, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw other anchors. accelerate's data loaders call this in a single process."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self) -> list[int]:
        """Tokens of each example."""
        longest = self.max_length or sys.maxsize
        rows = ((row["prompt_ids"], row["answer_ids"]) for row in self.rows)
        return [min(len(prompt) + len(answer), longest) for prompt, answer in rows]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` (seq,), ``anchors`` (at most num_anchors,)."""
        row = self.rows[index]
        prompt, answer = list(row["prompt_ids"]), list(row["answer_ids"])
        ids = torch.tensor((prompt + answer)[: self.max_length], device="cpu")
        labels = ids.clone()
        labels[: len(prompt)] = IGNORED
        # The token after an anchor is certain; probes predict those that follow it.
        first, last = max(len(prompt) - 1, 0), len(ids) - 3
        places = torch.arange(first, max(last + 1, first), device="cpu")
        if len(places) > self.num_anchors and self.random:
            chosen = torch.randperm(len(places), generator=self.generator(index), device="cpu")
            places = places[chosen[: self.num_anchors].sort().values]
        elif len(places) > self.num_anchors:
            steps = torch.arange(self.num_anchors, device="cpu") * len(places)
            places = places[steps // self.num_anchors]
        return {"input_ids": ids, "labels": labels, "anchors": places}

    def generator(self, index: int) -> torch.Generator:
        """Random numbers of an example in this epoch; of index -1 for their order."""
        # Consecutive seeds give unrelated streams of torch's generator.
        number = ((self.seed * 1_000_003) + self.epoch) * 1_000_003 + index
        return torch.Generator().manual_seed(number % 2**63)


class SimilarLengths(LengthGroupedSampler):
    """Draws batches of examples of similar length, in which there is little padding.

    Unlike those of its base, they are a function of seed and epoch, so that a training that was
    interrupted goes on with the same ones. `batch_size` counts the examples of all processes.
    """

    def __init__(self, batch_size: int, dataset: AnswerDataset):
        super().__init__(batch_size, lengths=dataset.lengths())
        self._dataset = dataset

    def __iter__(self) -> Iterator[int]:
        self.generator = self._dataset.generator(-1)
        return super().__iter__()


class NewAnchors(TrainerCallback):
    """Draws new anchors of the training data in each epoch.

    accelerate's data loaders do in a single process; in several they only notify the sampler.
    """

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        dataset = kwargs["train_dataloader"].dataset
        if isinstance(dataset, AnswerDataset):
            dataset.set_epoch(int(state.epoch or 0))


def collate(examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Pad on the right: ``input_ids``, ``labels``, ``attention_mask`` (batch, seq) and ``anchors``.

    Missing anchors are filled with a sequence's last token, after which there is nothing to
    predict.
    """
    batch = {
        name: pad_sequence([one[name] for one in examples], batch_first=True, padding_value=fill)
        for name, fill in (("input_ids", 0), ("labels", IGNORED), ("anchors", -1))
    }
    last = torch.tensor([[len(one["input_ids"]) - 1] for one in examples], device="cpu")
    places = torch.arange(batch["input_ids"].shape[1], device="cpu")
    anchors = batch["anchors"] if batch["anchors"].shape[1] else last
    batch["attention_mask"] = (places <= last).long()
    batch["anchors"] = torch.where(anchors < 0, last, anchors)
    return batch
