"""Trains an adapter on what a model generates, while others train the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

from hf_spec.adapters.checkpoint import WEIGHTS, read_weights
from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.tuner import Objective, TrainingBatch, random_anchors
from hf_spec.core.checks import UNFIT, explained
from hf_spec.modeling_patches.weights import placement, same_draws
from hf_spec.target.sequences import IGNORED

#: Largest norm of gradients, as of the Trainer.
MAX_NORM = 1.0


class Text(NamedTuple):
    """A prompt with the model's answer.

    Attributes:
        tokens: ids of both.
        prompt: number of those of the prompt.
    """

    tokens: Sequence[int]
    prompt: int

    @property
    def teaches(self) -> bool:
        """Whether there is a token to predict, as that after a prompt is certain, and the prompt is
        known, as embeddings in its place are not."""
        return 0 < self.prompt <= len(self.tokens) - 2


class OnlineTraining:
    """Trains an adapter that drafts for a model whose weights may change at any time.

    What is trained is a copy, in float32 where the adapter has 16 bits; after each step the adapter
    takes over its numbers, in its own memory, which recorded steps read. The model only runs: its
    weights, gradients and modes, and the default random generators, stay as they are.

    Args:
        model: the base model.
        find: gives the adapter, which must not be one that changes the model; None if it is gone.
        objective: the loss of its method.
        learning_rate: of AdamW; parts for which the adapter's config has another rate keep its
            ratio to ``usual_rate``.
        num_anchors: most anchors of each text.
        running: the context in which the objective runs, such as autocast.
        averaged: gives the mean of a tensor over all processes.
    """

    def __init__(
        self, model: Any, find: Callable[[], Adapter | None], objective: Objective,
        learning_rate: float, usual_rate: float, num_anchors: int = 64,
        running: Callable[[], AbstractContextManager[Any]] = nullcontext,
        averaged: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ):  # fmt: skip
        self._model, self._find, self._objective = model, find, objective
        self._num_anchors, self._running, self._averaged = num_anchors, running, averaged
        self._generator = torch.Generator("cpu").manual_seed(0)
        self.adapter = _copy_of(self._own, model)
        config, scale = self.adapter.config, learning_rate / usual_rate
        rates, later = config.learning_rates(), config.untrained(1.0)
        groups: dict[float, list[Tensor]] = {}
        for name, parameter in self.adapter.named_parameters():
            own = (rate * scale for part, rate in rates.items() if name.startswith(part))
            parameter.requires_grad_(name not in later)
            groups.setdefault(next(own, learning_rate), []).append(parameter)
        self._optimizer = torch.optim.AdamW(
            [{"params": params, "lr": rate} for rate, params in groups.items()], weight_decay=0.0
        )

    def learn(self, texts: Sequence[Text]) -> float:
        """Take a step on texts, some of which teach something; returns their loss."""
        batch = batch_of(texts, self._num_anchors, self._generator)
        with same_draws(placement(self._model).device), frozen(self._model), torch.enable_grad():
            with self._running():
                loss = self._objective(self._model, self.adapter, batch)["loss"]
            loss.backward()
        trained = []
        for one in self.adapter.parameters():
            if one.grad is not None:
                one.grad = self._averaged(one.grad)
                trained.append(one)
        # Numbers that are not finite, as of a text with extreme states, would spoil all later ones.
        if clip_grad_norm_(trained, MAX_NORM).isfinite():
            self._optimizer.step()
            self.hand_over()
        self._optimizer.zero_grad()  # gradients take no memory of the model's training
        return float(loss.detach())

    def load(self, folder: Path) -> None:
        """Go on with the numbers of an adapter in a folder; a ValueError if it is another one."""
        with explained(f"cannot read {str(folder)!r}", ValueError, OSError, *UNFIT):
            stored = read_weights(folder / WEIGHTS)
            self.adapter.load_state_dict(self.adapter.from_file(stored, torch.float32))
        self.hand_over()

    @property
    def _own(self) -> Adapter:
        """The adapter that drafts, which may be read anew, from a file that has changed."""
        found = self._find()
        if found is None:
            raise ValueError("the adapter that is trained is not active any more: activate it.")
        return found

    @torch.no_grad()
    def hand_over(self) -> None:
        """Give the adapter the numbers of the trained copy."""
        own = dict(self._own.named_parameters())
        for name, parameter in self.adapter.named_parameters():
            own[name].copy_(parameter)


def _copy_of(adapter: Adapter, model: Any) -> Adapter:
    """An adapter of its own with the same numbers, in float32 at least."""
    with same_draws(placement(model).device):
        made = type(adapter).build(copy.copy(adapter.config), model).eval()
    made.load_state_dict(adapter.state_dict())
    for parameter in made.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return made


def batch_of(
    texts: Sequence[Text], num_anchors: int, generator: torch.Generator | None = None
) -> TrainingBatch:
    """A batch with random anchors, padded on the right."""
    ids = [torch.tensor(one.tokens, device="cpu") for one in texts]
    labels = [own.clone() for own in ids]
    for own, one in zip(labels, texts):
        own[: one.prompt] = IGNORED
    masks = [torch.ones_like(own) for own in ids]
    padded, wanted, mask = (
        pad_sequence(parts, batch_first=True, padding_value=fill)
        for parts, fill in ((ids, 0), (labels, IGNORED), (masks, 0))
    )
    return TrainingBatch(padded, wanted, random_anchors(wanted, num_anchors, generator), mask)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """In the block no parameter of a model takes gradients."""
    trained = [one for one in model.parameters() if one.requires_grad]
    for one in trained:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in trained:
            one.requires_grad_(True)
