"""The trial of architectures that our tests do not cover: what it finds, and when it runs."""

import copy
import inspect
from typing import Any

import pytest
import torch
from conftest import STRATEGIES, Tiny, check_same, prompt, ragged
from torch import Tensor
from transformers import LlamaForCausalLM

import hf_spec
from hf_spec.decoding.strategy import check_tree_forward
from hf_spec.modeling_patches.modules import CACHE

pytestmark = pytest.mark.instructions

GREEDY = {"max_new_tokens": 4, "do_sample": False}
LOOKUP = STRATEGIES["prompt_lookup"]
SHOWN = ("position_ids", "attention_mask", CACHE)


def remote(tiny: Tiny, kind: type) -> Any:
    """The tiny llama as an architecture that nobody knows."""
    base = copy.deepcopy(tiny("llama"))
    base.__class__ = kind
    base.config.model_type = "remote"
    return base


class Remote(LlamaForCausalLM):
    """Shows in its forward's signature what `generate` looks for there."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        signature = inspect.signature(cls.forward)
        *own, rest = signature.parameters.values()
        own = [one for one in own if one.name not in SHOWN]
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in SHOWN]
        shown = signature.replace(parameters=[*own, *more, rest])
        cls.forward.__signature__ = shown  # type: ignore[attr-defined]


class Slots(Remote):
    """Counts slots of the cache where it is given positions."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Padding(Remote):
    """Sees the first two tokens even where they are padding."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask.clone()
            attention_mask[:, :2] = 1
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


class NoEmbeddings(Remote):
    """Looks up embeddings without its module."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        embeddings = torch.nn.functional.embedding(input_ids, self.model.embed_tokens.weight)
        return super().forward(inputs_embeds=embeddings, **kwargs)


class Transformed(Remote):
    """Something stands between its decoder and its output embeddings."""

    def forward(self, *args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        kwargs.pop("return_dict", None)
        output = self.model(*args, **kwargs)
        output.logits = self.lm_head(output.last_hidden_state.roll(1, dims=-1))
        return output


def test_positions_and_padding_that_are_mishandled(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="Slots does not work with prompt_lookup.*explicit masks"):
        remote(tiny, Slots).generate(prompt(), **GREEDY, **LOOKUP)
    model = remote(tiny, Padding)
    check_same(model, LOOKUP, prompt(), **GREEDY)
    with pytest.raises(ValueError, match="Padding does not work with prompt_lookup.*with padding"):
        model.generate(**ragged(), **GREEDY, **LOOKUP)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (
            NoEmbeddings,
            hf_spec.SpaceConfig(),
            "NoEmbeddings does not work with space.*not call",
        ),
        (Transformed, hf_spec.MedusaConfig(), "Transformed does not work with medusa.*final stat"),
        (Transformed, hf_spec.PPDConfig(), "Transformed does not work with ppd: it makes its log"),
    ],
    ids=["embeddings", "heads", "probes"],
)
def test_what_a_drafter_needs_is_tried(tiny: Tiny, kind: type, config: Any, message: str) -> None:
    model = remote(tiny, kind)
    check_same(model, LOOKUP, prompt(), **GREEDY)  # a strategy that needs less
    model.add_adapter(config)
    with pytest.raises(ValueError, match=message):
        model.generate(prompt(), **GREEDY, assistant_strategy=config.type_name.lower())


def test_once_per_model_and_kind_of_forward(tiny: Tiny) -> None:
    model = remote(tiny, LlamaForCausalLM)
    calls: list[int] = []
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    counts = []
    for given in (LOOKUP, LOOKUP, STRATEGIES["layer_skip"], STRATEGIES["layer_skip"]):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        model.generate(prompt(), **{**GREEDY, "max_new_tokens": 1}, **given)
        assert torch.equal(torch.get_rng_state(), state)
        counts.append(len(calls))
        calls.clear()
    assert counts[0] > counts[1] == counts[3] == 1 < counts[2]


def test_training_reads_final_states(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tree_forward(remote(tiny, LlamaForCausalLM), "training")
    with pytest.raises(ValueError, match="Transformed does not work with training.*final states"):
        check_tree_forward(remote(tiny, Transformed), "training")

    def full(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("full")

    model = remote(tiny, LlamaForCausalLM)
    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):  # which is no refusal
        check_tree_forward(model, "training")
