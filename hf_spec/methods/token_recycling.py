"""``token_recycling``: drafts from what the model itself predicted before, without any training."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.loading import save_unattached
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.core.checks import MAX_DRAFT_TOKENS, MAX_SIZE, check_count, choice, count, setting
from hf_spec.core.tree import Tree
from hf_spec.draft.options import DraftOptions
from hf_spec.methods.registry import Method
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.weights import placement, vocabulary
from hf_spec.predict.recycling import (
    AT_ONCE,
    ORDERS,
    TABLE_SIZE,
    RecyclingPredictor,
    SuccessorTable,
    learned_table,
)
from hf_spec.target.hidden_states import NUM_READ, Predicted, model_logits
from hf_spec.target.sequences import IGNORED, token_hidden

#: The rule of the number of entries of contexts of two tokens, and of those of three.
TABLE = count(1 << 10, 1 << 24)


@dataclass
class TokenRecyclingConfig(SpecPeftConfig):
    """Config of a table of what the model predicted in answers: where ``token_recycling`` starts.

    Raises:
        ValueError: a field is invalid.
    """

    type_name: ClassVar[str] = "TOKEN_RECYCLING"

    table_size: int = setting(
        TABLE_SIZE,
        "Room for contexts of two tokens, and as much for those of three; later ones replace "
        "earlier ones.",
        TABLE,
    )
    num_entries: int = setting(0, "Contexts that it knows (recorded).", count(0, MAX_SIZE))
    num_successors: int | None = setting(
        None, "Tokens that may follow each context (recorded).", count(1, MAX_DRAFT_TOKENS)
    )

    def check_base(self, model: nn.Module) -> None:
        super().check_base(model)
        if self.num_successors is None:
            self.num_successors = min(NUM_READ, vocabulary(model))
        most = vocabulary(model) + (ORDERS - 1) * self.table_size
        why = "A table of this table_size has no more. Take another copy of the adapter."
        check_count("num_entries", self.num_entries, 0, most, why)


class TableAdapter(Adapter):
    """``contexts`` (entries, 3) int32, latest token last, with -1 in front of shorter ones; the
    tokens ``successors`` (entries, successors) int32, and their ``log_probs`` in float16."""

    def __init__(self, config: TokenRecyclingConfig, model: Any) -> None:
        super().__init__(config, model)
        assert config.num_successors is not None  # set by check_base
        shape = config.num_entries, config.num_successors
        contexts = torch.full((config.num_entries, ORDERS), -1, dtype=torch.int32)
        self.register_buffer("contexts", contexts)
        self.register_buffer("successors", torch.zeros(shape, dtype=torch.int32))
        self.register_buffer("log_probs", torch.zeros(shape, dtype=torch.float16))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Bit for bit, so that nothing casts log-probabilities to the model's type.
        def apply(one: Tensor) -> Tensor:
            return fn(one.view(torch.int16)).view(one.dtype) if one.is_floating_point() else fn(one)

        return super()._apply(apply, recurse)

    @classmethod
    def of(cls, table: SuccessorTable, config: TokenRecyclingConfig, model: Any) -> Adapter:
        """What a table knows, as an adapter of a model; other fields are those of a config."""
        tensors = dict(zip(("contexts", "successors", "log_probs"), table.entries(), strict=True))
        entries, successors = tensors["successors"].shape
        config = replace(config, num_entries=entries, num_successors=successors)
        config.check_base(model)
        config.base_model_name_or_path = getattr(model, "name_or_path", None)
        made = cls.build(config, model)
        made.load_state_dict(tensors)
        return made


class AnswersTable:
    """See :class:`hf_spec.adapters.tuner.Fit`: a table of what the model predicts in answers.

    Args:
        adapter: what it knows already.
    """

    def __init__(self, model: Any, adapter: Adapter):
        self.model, self.config = model, adapter.config
        self.vocab, self.device = vocabulary(model), placement(model).device
        self.table = SuccessorTable(self.vocab, adapter.config.table_size, self.device)
        known = adapter.tensors().items()
        self.table.enter(**{name: one.to(self.device) for name, one in known})

    @torch.no_grad()
    def learn(self, batch: TrainingBatch) -> None:
        """Enter what the model predicts before each token of the answers."""
        hidden = token_hidden(self.model, batch.input_ids, batch.attention_mask)
        for ids, labels, states in zip(batch.input_ids, batch.labels, hidden):
            places = (labels[1:] != IGNORED).nonzero()[:, 0].cpu()
            gaps = (places.diff() > 1).nonzero()[:, 0] + 1  # between the turns of a chat
            for answer in places.tensor_split(gaps):
                if len(answer):
                    first, last = int(answer[0]), int(answer[-1])
                    self._learn_text(ids.to(states.device), states, first, last + 1)

    def _learn_text(self, ids: Tensor, states: Tensor, first: int, last: int) -> None:
        ids = ids.to(self.device)
        none = ids.new_full((ORDERS - 1,), self.vocab)
        for start in range(first, last, AT_ONCE):
            end = min(start + AT_ONCE, last)
            logits = model_logits(self.model, states[None, start:end])
            before = torch.cat([none, ids[:start]])[None, 1 - ORDERS :]
            found = Predicted.of(Tree.chain(ids[None, start:end]), logits.to(self.device))
            self.table.learn_text(before, found)

    def adapter(self) -> Adapter:
        """An adapter of what it knows now."""
        return TableAdapter.of(self.table, self.config, self.model)


def save_table(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write what calls with ``token_recycling`` have learned in this process as an adapter, from
    which calls of another process may start.

    It is the table of the last such call, with the adapter that it started from, if there was one.
    Files are replaced in one step. A card is not written: ``hf-spec card`` does that.

    Args:
        model: the model that has generated, or a ``PeftModel`` around it.
        folder: for the adapter; an earlier one of this type is replaced.

    Raises:
        ValueError: nothing was learned with the model, or the folder holds an adapter of another
            type.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ValueError(f"save_table() got a {kind}: give the model that has generated.")
    if not (folder and isinstance(folder, (str, os.PathLike))):
        raise ValueError(f"save_table(model, {folder!r}): give a folder, as a string or a path.")
    if Path(folder).is_file():
        raise ValueError(f"save_table(model, {str(folder)!r}): that is a file, give a folder.")
    base = unwrapped(model)
    table = learned_table(base)
    if table is None:
        raise ValueError(
            f"save_table: no call with this {type(base).__name__} has kept a table. First generate "
            "with assistant_strategy='token_recycling', without keep_table=False or "
            "acceptance='typical'."
        )
    with torch.inference_mode(False), torch.no_grad():
        config = TokenRecyclingConfig(table_size=table.wanted)
        save_unattached(TableAdapter.of(table, config, base), Path(folder))


@dataclass(frozen=True)
class RecyclingOptions(DraftOptions):
    """Options of ``token_recycling`` (Luo et al., 2025, section 3).

    Attributes:
        max_depth: depth of the deepest draft token.
        table_size: entries for contexts of two tokens, and as many for contexts of three; None for
            those that the adapter's table was made with, else 131,072.
        keep_table: whether calls share the model's table, and begin with what earlier ones have
            left.
    """

    max_depth: int = setting(8, rule=count(1, MAX_DRAFT_TOKENS))
    table_size: int | None = setting(None, rule=TABLE)
    keep_table: bool = setting(True, rule=choice(True, False))


METHOD = Method(
    name="token_recycling",
    summary="what the model predicted after the same tokens before, without any training",
    options=RecyclingOptions,
    predictor=RecyclingPredictor,
    adapter_config=TokenRecyclingConfig,
    adapter_module=TableAdapter,
    fit=AnswersTable,
    training={},
)
