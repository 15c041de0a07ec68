"""What drafters share whose candidates stand on trees of ranked predictions of future tokens.

It is what ``hf-spec tune`` needs of a drafter: how far it predicts and whether that takes probes,
its predictions at places of finished sequences, and what a step with given trees forwards.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from hf_spec.core.probes import ProbeRows
from hf_spec.core.tree import TokenTree, TreeBatch
from hf_spec.core.tree_states import TreeState, TreeStates
from hf_spec.methods.base import DecodingState, Draft, Drafter
from hf_spec.methods.online_policy import OnlineTrees
from hf_spec.methods.tuned_trees import TREE_FILE, Device, TunedTrees

#: What stands for tuned trees until the call's first step.
ROOT_ONLY = TreeStates.uniform(TokenTree.chain(0), 0)
#: Predictions of finished sequences that are made at once: they are vocabularies long.
AT_ONCE = 384

#: The tree of each row, the same as tensors, and the probes under its nodes.
StepRows = tuple[list[TokenTree], TreeBatch, ProbeRows | None]


class TreeDrafter(Drafter):
    """A drafter with trees.

    Args:
        states: the tree of each state, the number of tokens that are predicted; or those tuned for
            several devices, of which the call takes the nearest.
        online: chooses the tree of each step, if it does.

    Raises:
        ValueError: a tree has a rank that the model's vocabulary does not have.
    """

    def __init__(
        self,
        model: Any,
        options: Any,
        states: TreeStates | TunedTrees,
        online: OnlineTrees | None = None,
    ):
        super().__init__(model, options)
        vocab = model.config.get_text_config(decoder=True).vocab_size
        if states.max_rank >= vocab:
            where = TREE_FILE if isinstance(states, TunedTrees) else "tree"
            raise ValueError(
                f"{where} has a candidate of rank {states.max_rank}: ranks count from 0, and the "
                f"model has {vocab} tokens. Give another tree, or run hf-spec tune."
            )
        self.online = online
        self.tuned = states if isinstance(states, TunedTrees) else None
        self.states = ROOT_ONLY if isinstance(states, TunedTrees) else states

    def start(self, state: DecodingState) -> None:
        if self.tuned is not None:
            context = max(state.cache.host_lengths)
            self.states = self.tuned.select(Device.of(self.model), state.batch_size, context)
        if self.online is not None:
            self.online.start(state)

    def select(self, state: DecodingState, rows: Sequence[int]) -> None:
        if self.tuned is not None:  # another batch size may have other trees
            self.start(state)

    def observe(self, state: DecodingState, draft: Draft, nodes: Sequence[Sequence[int]]) -> None:
        if self.online is not None:
            self.online.observe(state, draft.num_rows, nodes)

    def details(self) -> dict[str, Any]:
        return {} if self.online is None else self.online.details()

    @property
    @abstractmethod
    def distances(self) -> int:
        """Tokens behind the next one that it predicts."""

    @property
    @abstractmethod
    def probes_per_node(self) -> int:
        """Probes that a node has at most, in distances; 0: predictions take no rows, and every step
        knows them all."""

    @abstractmethod
    def rows(self, states: Sequence[TreeState], device: str) -> StepRows:
        """What a step forwards.

        Args:
            states: the tree of each row with its probes.
            device: of the tensors.
        """

    @abstractmethod
    def candidates(
        self, state: DecodingState, trees: list[TokenTree], depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens on all nodes, ``(batch, nodes)``, and what they were sampled from, if they were.

        Args:
            state: with the hidden states of the step before.
            trees: of each row, no deeper than ``depth``, from 1, and the row's predictions.
        """

    @abstractmethod
    def future_logits(self, input_ids: Tensor, places: Tensor) -> Iterator[Tensor]:
        """Predictions at tokens of a finished sequence, as decoding makes them behind these.

        Args:
            input_ids: ``(1, seq)``, without padding.
            places: ``(places,)`` columns of ``input_ids``.

        Yields:
            ``(some, distances, vocab)`` for some places after the other, in their order; distance
            d, from 1, is that of the token 1 + d columns behind the place.
        """
