"""Adapters of ours in tests: filled with random weights, and merged by hand."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from conftest import VOCAB, prompt
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from hf_spec.adapters.layer import CONTAINER
from hf_spec.adapters.loading import find_active
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.tools.training.dataset import AnswerDataset, collate

#: Fields of adapters of the papers' own kind: without a Markov head, for all tokens.
PAPERS = {"markov_rank": 0, "draft_vocab_size": 0}
#: Fields of a Llama's config.
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


#: Names of tensors of any tokens.
TOKENS = ("contexts", "successors")


def as_in_papers(kind: Any) -> dict[str, int]:
    """Those of :data:`PAPERS` that a class of configs has."""
    return {name: value for name, value in PAPERS.items() if hasattr(kind, name)}


def make_base(path: Path, seed: int = 0) -> str:
    """The folder of a tiny model."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).save_pretrained(path)
    return str(path)


def load(path: str) -> Any:
    """A model of a test's own: loading takes longer than copying."""
    return copy.deepcopy(_loaded(path))


@cache
def _loaded(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path)


def randomise(model: Any, peft_type: str, std: float = 0.15, seed: int = 0) -> dict[str, Tensor]:
    """Fill the active adapter of a type, so that it changes something; gives its weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = find_active(model, peft_type).tensors()
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            tensor.data = (torch.randn(tensor.shape, generator=generator) * std).to(tensor)
        elif name in TOKENS:
            tensor.copy_(torch.randint(VOCAB, tensor.shape, generator=generator))
    return weights


def added(model: Any, config: Any, name: str = "default", std: float = 0.15, seed: int = 0) -> Any:
    """Give a model an adapter of random parameters, the active one; returns it."""
    model.add_adapter(config, name)
    model.set_adapter(name)
    randomise(model, config.type_name, std, seed)
    return find_active(model, config.type_name)


def saved(model: Any, config: Any, folder: Path) -> str:
    """The folder of an adapter of random parameters, which stays on the model."""
    made = get_peft_model(model, config)
    randomise(made, config.type_name)
    made.save_pretrained(str(folder))
    return str(folder)


@contextmanager
def lent(model: Any, config: Any, random: bool) -> Iterator[None]:
    """A model with an adapter, of random parameters or fresh, and then as it was."""
    torch.manual_seed(2)
    layers = [*getattr(model, CONTAINER, ())]
    model.add_adapter(config, "lent")
    if random:
        randomise(model, config.type_name)
    try:
        yield
    finally:
        model.delete_adapter("lent")
        if not layers:  # the next adapter is the first again, for which the base is frozen
            delattr(model, CONTAINER)
            model.requires_grad_(True)


def with_updates(model: PreTrainedModel, adapter: Any) -> PreTrainedModel:
    """A copy without the adapter, its low-rank updates added to the weights one by one."""
    oracle, config, weights = copy.deepcopy(model), adapter.config, adapter.tensors()
    oracle.delete_adapter(adapter.name)
    start = "draft_" if hasattr(config, "draft_rank") else ""
    scale = getattr(config, f"{start}alpha") / getattr(config, f"{start}rank")
    for name, module in oracle.named_modules():
        key = name.replace(".", "__")
        if f"up__{key}" in weights:
            update = scale * weights[f"up__{key}"].double() @ weights[f"down__{key}"].double()
            update = update.T if type(module).__name__ == "Conv1D" else update
            module.weight.data = (module.weight.double() + update).to(module.weight.dtype)
    return oracle


def batch_of(rows: list[tuple[list[int], list[int]]], num_anchors: int) -> dict[str, Tensor]:
    """A training batch of these prompts and answers."""
    data = [{"prompt_ids": one, "answer_ids": two} for one, two in rows]
    dataset = AnswerDataset(data, num_anchors=num_anchors)
    return collate([dataset[index] for index in range(len(data))])


def random_answers(count: int, length: int) -> list[tuple[list[int], list[int]]]:
    """Prompts of 6 tokens, and what follows up to that length; each text is longer by one."""
    generator, rows = torch.Generator().manual_seed(5), []
    for index in range(count):
        ids = torch.randint(3, 61, (length + index,), generator=generator).tolist()
        rows.append((ids[:6], ids[6:]))
    return rows


def two_answers() -> dict[str, Tensor]:
    """A training batch; the second sequence is padded, and an anchor is in a prompt."""
    ids, mask = prompt(12, 2), torch.ones(2, 12, dtype=torch.long)
    ids[1, 10:], mask[1, 10:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    anchors = torch.tensor([[1, 7, 10], [5, 7, 9]])
    return {"input_ids": ids, "labels": labels, "anchors": anchors, "attention_mask": mask}


def losses_one_by_one(
    model: Any, batch: dict[str, Tensor], predict: Callable[[Tensor], Sequence[Tensor]],
    first: int = 1, hard: bool = True,
) -> list[list[tuple[int, Tensor]]]:  # fmt: skip
    """The losses of each sequence's predictions, with their distances.

    Args:
        predict: logits ``(vocab,)`` of the token at each distance, from ``first`` on, behind a
            text ``(seq,)``; the model itself predicts that of distance 0.
        hard: whether they are cross-entropies of the text's tokens; else divergences from the
            model's own distributions.
    """
    found = []
    for ids, labels, anchors, mask in zip(*batch.values()):
        ids, losses = ids[: mask.sum()], []
        own = model(ids[None]).logits[0].detach().log_softmax(-1)
        for anchor in anchors.tolist():
            for distance, logits in enumerate(predict(ids[: anchor + 1]), first):
                at, log_q = anchor + 1 + distance, logits.log_softmax(-1)
                if at >= len(ids) or labels[at] == -100:
                    continue
                p = own[at - 1]
                loss = -log_q[ids[at]] if hard else (p.exp() * (p - log_q)).sum()
                losses.append((distance, loss))
        found.append(losses)
    return found


def cache_behind(model: Any, ids: Tensor, front: Iterable[Sequence[Tensor]]) -> DynamicCache:
    """The cache of a text ``(seq,)`` that has not seen what is in front of it: in each layer these
    keys and values, ``(heads, n, dim)``."""
    seen, cache = DynamicCache(), DynamicCache()
    model(input_ids=ids[None], **{CACHE: seen}, use_cache=True)
    for index, (layer, own) in enumerate(zip(seen.layers, front, strict=True)):
        states = zip(own, (layer.keys, layer.values))
        cache.update(*(torch.cat([one[None], two], 2) for one, two in states), index)
    return cache


def hooked(model: Any) -> int:
    """How many low-rank updates are attached to the model's modules."""
    hooks = (hook for module in model.modules() for hook in module._forward_hooks.values())
    return sum(type(hook).__module__ == "hf_spec.modeling_patches.low_rank" for hook in hooks)


class Opaque(torch.nn.Module):
    """A linear module whose numbers cannot be seen, as those of a quantized one, or of a share."""

    def __init__(self, inner: torch.nn.Linear, bias: Tensor | None = None):
        super().__init__()
        self.__dict__["inner"] = inner
        self.in_features, self.out_features, self.bias = inner.in_features, inner.out_features, bias

    def forward(self, states: Tensor) -> Tensor:
        return self.inner(states) + (0 if self.bias is None else self.bias)


class Embeddings(torch.nn.Module):
    """What a Markov head uses of a base model.

    Args:
        into: ``(vocab, embedding)`` of tokens.
        out: ``(vocab, hidden)`` of logits.
    """

    def __init__(self, into: torch.Tensor, out: torch.Tensor):
        super().__init__()
        self.into: Any = torch.nn.Embedding.from_pretrained(into, freeze=False)
        self.out: Any = torch.nn.Linear(out.shape[1], out.shape[0], bias=False)
        self.out.weight = torch.nn.Parameter(out)

    def get_input_embeddings(self) -> Any:
        return self.into

    def get_output_embeddings(self) -> Any:
        return self.out
