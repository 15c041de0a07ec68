"""Models that are not what their type promises: hooks, attention and functions of the user's own.

They decode as plain generation does, perhaps token by token, or are refused by name before the
first token.
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
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask, sdpa_mask

import hf_spec
from hf_spec.adapters.layer import CONTAINER, Adapter
from hf_spec.modeling_patches.fingerprint import fingerprint
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.target.target import UNPADS
from hf_spec.threads import memory

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


def from_sixth(hidden: Tensor) -> Tensor:
    return torch.cat([hidden[:, :5], to_all(hidden[:, 5:])], dim=1)


#: They tell tokens apart.
APART: list[Callable[[Tensor], Tensor]] = [
    to_last,
    from_sixth,
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


def alike(hook: Any) -> Any:
    """The hook, which says that it treats tokens alike."""
    hook.treats_tokens_alike = True
    return hook


def drafts(model: Any) -> bool:
    """Whether the last call drafted anything."""
    return bool(hf_spec.last_stats(model).num_drafted_tokens)


@pytest.mark.parametrize("method", METHODS)
def test_with_hooks_that_may_tell_tokens_apart_steps_are_of_one_token(
    fresh: Tiny, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says so, and what to say of hooks that do not. Others that say so are refused."""
    model = ready(fresh, method)
    check_same(model, drafting(method), prompt(), **GREEDY)
    assert drafts(model)
    for change in APART:
        handle = model.model.layers[1].register_forward_hook(steered(change))
        for given in ({"inputs": prompt()}, ragged((12, 5))):
            check_same(model, drafting(method), **given, **GREEDY)
            assert not drafts(model)
        handle.remove()
        handle = model.model.layers[1].register_forward_hook(alike(steered(change)))
        with pytest.raises(
            ValueError, match=rf"hooks \(steer\) does not work with {method}.*apart"
        ):
            model.generate(prompt(), **GREEDY, **drafting(method))
        handle.remove()
        check_same(model, drafting(method), prompt(), **GREEDY)
        assert drafts(model)
    [warned] = [one.message for one in caplog.records if "one token each" in one.message]
    assert "hooks (steer), so" in warned and "set treats_tokens_alike = True on each" in warned


def test_hooks_of_transformers_are_known(fresh: Tiny) -> None:
    """As in training, for gradient checkpointing with adapters."""
    model = fresh("llama")
    model.enable_input_require_grads()
    check_same(model, LOOKUP, prompt(), **GREEDY)
    assert drafts(model)


def drops_keys(module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Keeps every other key of a prompt."""
    if kwargs["hidden_states"].shape[1] > drops_keys.least:
        cache = next(one for one in kwargs.values() if isinstance(one, Cache))
        layer = cache.layers[module.layer_idx]
        layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]


def test_hooks_that_drop_keys(fresh: Tiny) -> None:
    """After the prompt; later they are refused."""
    model = fresh("llama")
    stock = model.generate(prompt(), **GREEDY)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drops_keys, with_kwargs=True)
    for least in (1, 10):
        drops_keys.least = least
        for given in (prompt(), prompt(batch=2)):
            check_same(model, LOOKUP, given, **GREEDY)
        assert model.generate(prompt(), **GREEDY).tolist() != stock.tolist()
    drops_keys.least = 0
    with pytest.raises(ValueError, match="layer of a TreeCache"):
        model.generate(prompt(), **GREEDY, **LOOKUP)


def test_what_runs_several_tokens_after_the_prompt_is_refused_with_such_hooks(fresh: Tiny) -> None:
    model = fresh("llama")
    out = model.generate(prompt(), **GREEDY, **LOOKUP, return_dict_in_generate=True)
    hook, ids = steered(to_all), torch.cat([out.sequences, prompt(4)], dim=1)
    model.model.layers[1].register_forward_hook(hook)
    with pytest.raises(ValueError, match="TreeCache .* is continued by forwards.*treats_tokens_al"):
        model.generate(ids, **GREEDY, **LOOKUP, **{CACHE: out[CACHE]})
    model.generate(ids, **GREEDY, **LOOKUP, **{CACHE: DynamicCache()})
    alike(hook)
    model.generate(ids, **GREEDY, **LOOKUP, **{CACHE: out[CACHE]})


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
    """It counts its calls, and so is tried once."""
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
            check_same(model, LOOKUP, prompt(), **GREEDY)


@pytest.mark.parametrize("method", METHODS)
def test_hooks_on_all_tokens(fresh: Tiny, method: str) -> None:
    model, calls = ready(fresh, method), []
    unhooked = model.generate(prompt(), **GREEDY)
    model.model.layers[1].register_forward_hook(alike(steered(to_all)))
    model.model.layers[0].register_forward_hook(alike(lambda *_: calls.append(1)))
    assert check_same(model, drafting(method), prompt(), **GREEDY).tolist() != unhooked.tolist()
    calls.clear()
    model.generate(prompt(), **GREEDY, **drafting(method))
    assert drafts(model)
    assert len(calls) <= GREEDY["max_new_tokens"], "no trial in later calls"


@pytest.mark.parametrize("method", METHODS)
def test_hooks_with_a_value_per_row(fresh: Tiny, method: str) -> None:
    """Rows stay in their places when others end."""
    model = ready(fresh, method)
    by_row = alike(steered(lambda hidden: hidden + VECTORS[: len(hidden)]))
    model.model.layers[1].register_forward_hook(by_row)
    for given in ({"input_ids": prompt(batch=3)}, ragged((40, 5, 9))):
        plain = model.generate(**given, max_new_tokens=24, do_sample=False, eos_token_id=None)
        ends = [int(token) for token in plain[:2, -20]]
        for eos in ([EOS], ends):
            check_same(model, drafting(method), **given, max_new_tokens=24, eos_token_id=eos)


def test_hooks_with_a_value_per_row_after_calls_without_them(fresh: Tiny) -> None:
    """What those calls told of forwards without padding says nothing of these."""
    model, given = fresh("llama"), {**ragged((9, 4, 6), 3), "max_new_tokens": 30}
    model.generate(**given, **LOOKUP)
    assert memory(model)[UNPADS, True]
    handle = model.model.layers[1].mlp.register_forward_hook(
        alike(steered(lambda hidden: hidden + VECTORS[: len(hidden)]))
    )
    check_same(model, LOOKUP, **given)
    assert not memory(model)[UNPADS, True]
    handle.remove()
    check_same(model, LOOKUP, **given)
    assert memory(model)[UNPADS, True]


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


SETTINGS = {"on": 0}


class Switched(nn.Module):
    """Tells tokens apart once it is switched on."""

    kinds = (0,)

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.number, self.words, self.things = inner, 0, ["off"], [{"on": False}]
        self.plain, self.gate = torch.zeros(()), nn.Parameter(torch.zeros(()))
        self.register_buffer("flag", torch.tensor(0))
        self.function: Callable[[], int] = lambda: 0

    def by(self) -> Tensor:
        numbers = self.number + self.kinds[0] + (self.words == ["on"]) + self.things[0]["on"]
        return numbers + self.function() + SETTINGS["on"] + self.plain + self.gate + self.flag

    def forward(self, hidden: Tensor) -> Tensor:
        return to_last(self.inner(hidden), self.by() * VECTORS[0])


SWITCHES: dict[str, Callable[[Switched], Any]] = {
    "number": lambda own: setattr(own, "number", 1),
    "words": lambda own: own.words.__setitem__(0, "on"),
    "things": lambda own: own.things[0].update(on=True),
    "class": lambda own: setattr(type(own), "kinds", (1,)),
    "global": lambda own: SETTINGS.update(on=1),
    "function": lambda own: setattr(own, "function", lambda: 1),
    "tensor": lambda own: own.plain.fill_(1),
    "buffer": lambda own: own.flag.fill_(1),
    "parameter": lambda own: own.gate.data.fill_(1) and own.gate.mul_(1),
    "forward": lambda own: setattr(own.inner, "forward", lambda hidden: to_last(hidden)),
}


@torch.no_grad()
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_module_of_ones_own_that_is_switched_on(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setattr(Switched, "kinds", (0,))
    monkeypatch.setitem(SETTINGS, "on", 0)
    model, calls = fresh("llama"), []
    layer = model.model.layers[1]
    layer.mlp = own = Switched(layer.mlp)
    layer.register_forward_pre_hook(alike(lambda *_: calls.append(1)))
    check_same(model, LOOKUP, prompt(), **GREEDY)
    calls.clear()
    model.generate(prompt(), **GREEDY, **LOOKUP)
    assert len(calls) <= GREEDY["max_new_tokens"], "no trial in later calls"
    SWITCHES[switch](own)
    with pytest.raises(ValueError, match="than token by token"):
        model.generate(prompt(), **GREEDY, **LOOKUP)


class Counting(nn.Module):
    """Tells tokens apart in later calls."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.inner(hidden)
        return to_last(hidden) if self.calls > 60 else hidden


def test_what_changes_as_it_runs_cannot_be_tried(
    fresh: Tiny, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh("llama")
    layer = model.model.layers[1]
    layer.mlp = own = Counting(layer.mlp)
    seen = []
    for _ in range(4):
        found = []
        for spec in (LOOKUP, {}):
            own.calls = 20 * len(seen)
            found.append(model.generate(prompt(), **GREEDY, **spec).tolist())
        seen.append(own.calls)
        assert found[0] == found[1] or len(seen) == 1, "the trial is counted, too"
        assert not drafts(model)
    [warned] = [one.message for one in caplog.records if "one token each" in one.message]
    assert "hold changes as they run (Counting.calls)" in warned
    monkeypatch.setattr(Counting, "treats_tokens_alike", True, raising=False)
    own.calls = 0
    check_same(model, LOOKUP, prompt(), **GREEDY)
    assert drafts(model)


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


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_modules_with_a_value_per_row(fresh: Tiny, method: str, alike: bool) -> None:
    """As with hooks, rows stay in their places when others end."""
    model, given = ready(fresh, method), {**ragged((9, 4, 6), 3), "max_new_tokens": 24}
    mlp = model.model.layers[1].mlp
    stock = mlp.forward
    mlp.forward = lambda hidden: stock(hidden) + VECTORS[: len(hidden)]
    mlp.forward.treats_tokens_alike = alike
    plain = model.generate(**given, do_sample=False, eos_token_id=None)
    ends = [int(token) for token in plain[:2, -20]]
    check_same(model, drafting(method), **given, eos_token_id=ends)
    assert drafts(model)


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
    attention, norm = model.model.layers[1].self_attn, model.model.norm

    def set_to(owner: Any, name: str, value: Any) -> tuple[Any, Any]:
        old = getattr(owner, name)
        return (lambda: setattr(owner, name, value)), (lambda _: setattr(owner, name, old))

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
        set_to(attention, "scaling", 2.0), set_to(attention, "scaling", float("nan")),
        set_to(norm, "variance_epsilon", 1), set_to(model.config, "rope_parameters", {"a": 1}),
        set_to(model.config, "hidden_act", "gelu"), set_to(attention, "forward", sdpa),
    ]  # fmt: skip
    for change, undo in changes:
        undone = change()
        changed = fingerprint(model)
        assert changed != first and changed == fingerprint(model)
        undo(undone)
        if "forward" in vars(attention):
            del attention.forward
        assert fingerprint(model) == first
    states = set()
    for scaling in (-1, -2, -1.0, True, "-1", None, (1, 2), (1, 3)):
        attention.scaling = scaling
        states.add(fingerprint(model).state)
    assert len(states) == 8


def test_adapters_of_other_packages_do_not_change_a_model(fresh: Tiny) -> None:
    """The base's forward does not run them, so that it is as Transformers has made it."""

    class Gate(nn.Module):
        pass

    class Own(Adapter):
        def __init__(self, config: Any, model: Any):
            super().__init__(config, model)
            self.gate = Gate()

    model = fresh("llama")
    assert fingerprint(model).stock
    model.add_module(CONTAINER, nn.ModuleDict({"OWN": Own(None, model)}))
    assert fingerprint(model).stock
    model.add_module("gate", Gate())
    assert not fingerprint(model).stock
