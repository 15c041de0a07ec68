"""Models that are not what their type promises: hooks, attention and functions of the user's own.

They decode as plain generation does, or are refused by name before the first token.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from adapter_oracle import randomise
from conftest import EOS, STRATEGIES, Tiny, check_same, prompt, ragged
from peft import LoraConfig, get_peft_model
from running import drafting
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

import hf_spec
from hf_spec.modeling_patches.fingerprint import fingerprint

pytestmark = pytest.mark.usefixtures("hooks_count")

LOOKUP = STRATEGIES["prompt_lookup"]
GREEDY = {"max_new_tokens": 8, "do_sample": False}
#: Strategies that run forwards in different ways: tokens alone, heads on states, probes.
METHODS = {"prompt_lookup": None, "medusa": hf_spec.MedusaConfig(), "ppd": hf_spec.PPDConfig()}
#: What is added to hidden states, per feature and per row.
VECTORS = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(0))


def steered(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A forward hook that changes the hidden states which a layer returns."""

    def steer(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    return steer


def to_last(hidden: Tensor, by: Tensor = VECTORS[0]) -> Tensor:
    return torch.cat([hidden[:, :-1], hidden[:, -1:] + by], dim=1)


def to_all(hidden: Tensor) -> Tensor:
    return hidden + VECTORS[0]


#: They tell tokens apart.
APART: list[Callable[[Tensor], Tensor]] = [
    to_last,
    lambda hidden: to_all(hidden) if hidden.shape[1] == 1 else hidden,
    lambda hidden: to_all(hidden) if hidden.shape[1] > 1 else hidden,
]


def ready(fresh: Tiny, method: str) -> PreTrainedModel:
    """A model with the method's adapter, whose parameters are random."""
    model, config = fresh("llama"), METHODS[method]
    if config is not None:
        model.add_adapter(config, method)
        randomise(model, config.type_name)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_hooks_that_tell_tokens_apart_are_refused(fresh: Tiny, method: str) -> None:
    model = ready(fresh, method)
    check_same(model, drafting(method), prompt(), **GREEDY)
    for change in APART:
        handle = model.model.layers[1].register_forward_hook(steered(change))
        with pytest.raises(ValueError, match=rf"hooks \(steer\) does not work with {method}"):
            model.generate(prompt(), **GREEDY, **drafting(method))
        handle.remove()
        check_same(model, drafting(method), prompt(), **GREEDY)


class Steering:
    """A hook that is switched on, or made stronger, after it was registered."""

    def __init__(self) -> None:
        self.on, self.strength, self.calls = False, 0.0, 0
        self.vector = torch.zeros(32)

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        self.calls += 1
        by = VECTORS[0] if self.on else self.strength * VECTORS[0] + self.vector
        return steered(lambda hidden: to_last(hidden, by))(module, args, output)


def test_a_hook_that_is_switched_on(fresh: Tiny) -> None:
    for attribute, value in (("on", True), ("strength", 1.0), ("vector", VECTORS[1, 0])):
        for register in (lambda steering: steering, lambda steering: steering.__call__,
                         lambda steering: lambda *given: steering(*given)):  # fmt: skip
            model, steering = fresh("llama"), Steering()
            model.model.layers[1].register_forward_hook(register(steering))
            check_same(model, LOOKUP, prompt(), **GREEDY)
            calls = steering.calls
            model.generate(prompt(), **GREEDY, **LOOKUP)
            assert steering.calls - calls <= GREEDY["max_new_tokens"], "no trial"
            if attribute == "vector":
                steering.vector.copy_(value)
            else:
                setattr(steering, attribute, value)
            with pytest.raises(ValueError, match="than token by token. Remove the hooks"):
                model.generate(prompt(), **GREEDY, **LOOKUP)


@pytest.mark.parametrize("method", METHODS)
def test_hooks_on_all_tokens(fresh: Tiny, method: str) -> None:
    model, calls = ready(fresh, method), []
    unhooked = model.generate(prompt(), **GREEDY)
    model.model.layers[1].register_forward_hook(steered(to_all))
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert check_same(model, drafting(method), prompt(), **GREEDY).tolist() != unhooked.tolist()
    calls.clear()
    model.generate(prompt(), **GREEDY, **drafting(method))
    assert len(calls) <= GREEDY["max_new_tokens"], "no trial in later calls"


@pytest.mark.parametrize("method", METHODS)
def test_hooks_with_a_value_per_row(fresh: Tiny, method: str) -> None:
    """Rows stay in their places when others end."""
    model = ready(fresh, method)
    by_row = steered(lambda hidden: hidden + VECTORS[: len(hidden)])
    model.model.layers[1].register_forward_hook(by_row)
    for given in ({"input_ids": prompt(batch=3)}, ragged((40, 5, 9))):
        plain = model.generate(**given, max_new_tokens=24, do_sample=False, eos_token_id=None)
        ends = [int(token) for token in plain[:2, -20]]
        for eos in ([EOS], ends):
            check_same(model, drafting(method), **given, max_new_tokens=24, eos_token_id=eos)


# -- attention ---------------------------------------------------------------------------------


def flatter(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float = 1.0, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention at a higher temperature."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    causal = attention_mask is None and query.shape[2] > 1
    if flatter.boolean and attention_mask is not None:
        attention_mask = ~attention_mask.logical_not()
    output = sdpa(query, key, value, attention_mask, 0.0, causal, scale=0.4 * scaling)
    return output.transpose(1, 2).contiguous(), None


def blind(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The same without masks."""
    return flatter(*args[:4], None, *args[5:], **kwargs)


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Registers attention of the name "own" for one test."""

    def register(function: Any, mask: Any = None) -> None:
        flatter.boolean = mask is sdpa_mask
        AttentionInterface.register("own", function)
        if mask is not None:
            AttentionMaskInterface.register("own", mask)

    yield register
    AttentionInterface._global_mapping.pop("own", None)
    AttentionMaskInterface._global_mapping.pop("own", None)


@pytest.mark.parametrize("mask", [sdpa_mask, eager_mask, None])
def test_registered_attention_gets_tree_masks(fresh: Tiny, register: Any, mask: Any) -> None:
    register(flatter, mask)
    for method in METHODS:
        model = ready(fresh, method)
        stock = model.generate(prompt(), **GREEDY)
        model.set_attn_implementation("own")
        ours = check_same(model, drafting(method), prompt(), **GREEDY)
        assert ours.tolist() != stock.tolist()
        if mask is not None:  # else Transformers tells it nothing of padding
            check_same(model, drafting(method), **ragged(), **GREEDY)


def check_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="does not take explicit masks"):
        model.generate(prompt(), **GREEDY, **LOOKUP)


def test_attention_that_ignores_masks_is_refused(
    fresh: Tiny, register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(blind, sdpa_mask)
    model = fresh("llama")
    model.set_attn_implementation("own")
    check_refused(model)
    model.set_attn_implementation("sdpa")
    check_same(model, LOOKUP, prompt(), **GREEDY)

    def replaced(query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        kwargs["is_causal"] = query.shape[2] == key.shape[2]
        return sdpa(query, key, value, **{**kwargs, "attn_mask": None})

    with monkeypatch.context() as patch:  # as SageAttention says to use it
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", replaced)
        check_refused(model)
    check_same(model, LOOKUP, prompt(), **GREEDY)


# -- modules and adapters ------------------------------------------------------------------------


class ToLast(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return to_last(hidden)


def test_other_modules_and_forwards_are_tried(fresh: Tiny) -> None:
    model = fresh("llama")
    layer = model.model.layers[1]
    mlp, stock = layer.mlp, layer.mlp.forward
    layer.mlp = nn.Sequential(mlp, ToLast())
    check_refused(model)
    layer.mlp = mlp
    mlp.forward = lambda hidden: to_last(stock(hidden))
    check_refused(model)
    del mlp.forward
    check_same(model, LOOKUP, prompt(), **GREEDY)


def test_activated_loras_are_refused(fresh: Tiny) -> None:
    config = LoraConfig(
        r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]
    )
    model = get_peft_model(fresh("llama"), config).eval()
    with pytest.raises(ValueError, match="alora_invocation_tokens='default'"):
        model.generate(input_ids=prompt(), **GREEDY, **LOOKUP)
    with model.disable_adapter():
        check_same(model, LOOKUP, input_ids=prompt(), **GREEDY)


def test_fingerprints(fresh: Tiny) -> None:
    """A model runs as before until something of it changes; what strategies add does not count."""
    model = fresh("llama")
    first = fingerprint(model)
    assert first.stock and not first.rows_stay and not first.hooks
    model.generate(prompt(), **GREEDY, **LOOKUP)
    model(prompt(), output_hidden_states=True)
    assert fingerprint(model) == first
    hook, remove = steered(to_all), RemovableHandle.remove
    changes: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (lambda: model.model.layers[0].register_forward_hook(hook), remove),
        (lambda: nn.modules.module.register_module_forward_hook(hook), remove),
        (lambda: model.bfloat16(), lambda _: model.float()),
        (lambda: model.train(), lambda _: model.eval()),
        (lambda: model.set_attn_implementation("eager"),
         lambda _: model.set_attn_implementation("sdpa")),
        (lambda: torch.set_float32_matmul_precision("high"),
         lambda _: torch.set_float32_matmul_precision("highest")),
        (lambda: torch.use_deterministic_algorithms(True),
         lambda _: torch.use_deterministic_algorithms(False)),
    ]  # fmt: skip
    for change, undo in changes:
        undone = change()
        changed = fingerprint(model)
        assert changed != first and changed == fingerprint(model)
        undo(undone)
        assert fingerprint(model) == first
