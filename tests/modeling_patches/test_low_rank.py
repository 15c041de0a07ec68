"""Low-rank updates by hooks equal dense updates of the weights, and leave no trace.

The oracle is a copy of the model whose weights are W + scale * B A, made here without our code.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import build
from conftest import ARCHITECTURES, prompt
from peft import LoraConfig, get_peft_model
from running import added, fingerprint
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from modeling_patches import modules
from modeling_patches.low_rank import LowRank
from modeling_patches.merging import Factors
from modeling_patches.modules import decoder_layers, linear_modules, output_projections
from modeling_patches.weights import features

Tiny = Callable[..., PreTrainedModel]
RANK, SCALE = 3, 0.7


def random_factors(
    modules: dict[str, nn.Module], dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Factors]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in modules.items():
        inputs, outputs = features(module)
        down = torch.randn(RANK, inputs, generator=generator) * 0.2
        up = torch.randn(outputs, RANK, generator=generator) * 0.2
        found[name] = Factors(down.to(dtype), up.to(dtype), SCALE)
    return found


def dense(model: PreTrainedModel, factors: dict[str, Factors]) -> PreTrainedModel:
    """A copy with the updates in its weights."""
    changed = copy.deepcopy(model)
    for name, (down, up, scale) in factors.items():
        module = changed.get_submodule(name)
        update = torch.einsum("or,ri->oi", up.double(), down.double()) * scale
        if isinstance(module, Conv1D):
            update = update.T
        module.weight.data = (module.weight.double() + update).to(module.weight.dtype)
    return changed


def logits(model: Any, ids: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(prompt(9) if ids is None else ids).logits


# -- what is computed ----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_dense_updates(tiny: Tiny, architecture: str) -> None:
    # Mixtral's grouped products exist in fp32 only.
    dtype = torch.float32 if architecture == "mixtral" else torch.float64
    model = tiny(architecture, dtype=dtype)
    modules = linear_modules(model)
    assert len(modules) >= 2 * len(decoder_layers(model))
    factors = random_factors(modules, dtype)
    plain, expected = logits(model), logits(dense(model, factors))
    with added(LowRank.add_to, LowRank(modules, factors.get)):
        updated = logits(model)
    # Another order of operations, in fp32 for mixtral, gpt_neo's scores and some norms.
    torch.testing.assert_close(updated, expected, rtol=1e-4, atol=1e-4)
    assert (updated - plain).abs().max() > 0.1
    assert torch.equal(logits(model), plain)


def test_factors_more_precise_than_the_model(tiny: Tiny) -> None:
    """fp32 factors on a bf16 model: the sum is rounded once, to the model's type."""
    model = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    modules = linear_modules(model)
    factors = random_factors(modules)
    module = modules["model.layers.0.self_attn.q_proj"]
    inputs = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    with added(LowRank.add_to, LowRank(modules, factors.get)):
        output = module(inputs)
        assert logits(model).dtype == torch.bfloat16
    down, up, scale = factors["model.layers.0.self_attn.q_proj"]
    expected = module(inputs).float() + scale * (inputs.float() @ down.T) @ up.T
    assert output.dtype == torch.bfloat16
    # One unit in the last of bfloat16's 8 bits: fp32 sums come in another order.
    torch.testing.assert_close(output, expected.bfloat16(), rtol=2**-7, atol=1e-6)


def test_only_input_and_output_of_a_module_are_used() -> None:
    """A stand-in for a quantised linear module: no weight that could be read."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 4, 6
            self.register_buffer("codes", torch.arange(24, dtype=torch.int8).view(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.codes.to(x.dtype).T

    module, x = Packed(), torch.randn(3, 4)
    factors = random_factors({"": module})
    update = LowRank({"": module}, factors.get)
    plain = module(x)
    with added(LowRank.add_to, update):
        down, up, scale = factors[""]
        torch.testing.assert_close(module(x), plain + scale * x @ down.T @ up.T)
    with pytest.raises(ValueError, match=r"cannot merge into .* is a Packed.*unmerged"):
        update.merge(module)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(tiny: Tiny, checkpointing: bool) -> None:
    """Gradients of the factors are those of the dense model's weights, by the chain rule."""
    model = copy.deepcopy(tiny("llama", dtype=torch.float64))
    modules = linear_modules(model)
    factors = random_factors(modules, torch.float64)
    oracle = dense(model, factors)
    model.requires_grad_(False)
    for down, up, _ in factors.values():
        down.requires_grad_(True), up.requires_grad_(True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    ids = prompt(9)
    update = LowRank(modules, factors.get)
    update.attach()
    model(ids, labels=ids, use_cache=False).loss.backward()
    update.detach()
    oracle(ids, labels=ids, use_cache=False).loss.backward()
    for name, (down, up, scale) in factors.items():
        grad = oracle.get_submodule(name).weight.grad  # (out, in)
        torch.testing.assert_close(down.grad, scale * up.detach().T @ grad)
        torch.testing.assert_close(up.grad, scale * grad @ down.detach().T)
    assert all(p.grad is None for p in model.parameters())


# -- on and off ----------------------------------------------------------------------------------


def test_switching_leaves_no_trace(tiny: Tiny) -> None:
    model = copy.deepcopy(tiny("llama"))
    before, plain = fingerprint(model), logits(model)
    modules = linear_modules(model)
    one, two = (LowRank(modules, random_factors(modules, seed=s).get) for s in (0, 1))
    one.attach()
    first = logits(model)
    assert not torch.equal(first, plain)
    one.attach()  # once is enough
    assert torch.equal(logits(model), first)
    two.attach()  # a second update on the same modules
    assert not torch.equal(logits(model), first)
    two.detach()
    assert torch.equal(logits(model), first)
    one.detach()
    one.detach()
    assert torch.equal(logits(model), plain) and fingerprint(model) == before


def test_updates_of_one_call(tiny: Tiny) -> None:
    """Other forwards run without them; a second use adds nothing to the model."""
    model = copy.deepcopy(tiny("llama"))
    plain, modules = logits(model), linear_modules(model)
    one, two = (LowRank(modules, random_factors(modules, seed=s).get) for s in (0, 1))
    with added(LowRank.add_to, one):
        first, once = logits(model), fingerprint(model)
        with added(LowRank.add_to, two):
            both = logits(model)
        assert torch.equal(logits(model), first)
    assert not torch.equal(first, plain) and not torch.equal(both, first)
    with pytest.raises(RuntimeError), added(LowRank.add_to, two):
        raise RuntimeError
    assert torch.equal(logits(model), plain) and fingerprint(model) == once
    one.attach()
    with added(LowRank.add_to, two):  # beside what is attached
        torch.testing.assert_close(logits(model), both)
    one.detach()
    assert torch.equal(logits(model), plain) and fingerprint(model) == once


class Source(nn.Module):
    """Factors that live in a module of the model, as an adapter's do."""

    def __init__(self, factors: dict[str, Factors]) -> None:
        super().__init__()
        self.names = list(factors)
        self.down = nn.ParameterList(f.down for f in factors.values())
        self.up = nn.ParameterList(f.up for f in factors.values())

    def get(self, name: str) -> Factors:
        index = self.names.index(name)
        return Factors(self.down[index], self.up[index], SCALE)


def pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copied_model_has_updates_of_its_own(tiny: Tiny, duplicate: Callable[..., Any]) -> None:
    model = copy.deepcopy(tiny("llama"))
    modules, plain = linear_modules(model), logits(model)
    model.extra = Source(random_factors(modules))
    LowRank(modules, functools.partial(Source.get, model.extra)).attach()
    expected = logits(model)
    other = duplicate(model)
    assert torch.equal(logits(other), expected)
    with torch.no_grad():
        for parameter in other.extra.parameters():
            parameter.zero_()
    assert not torch.equal(logits(other), expected)
    assert torch.equal(logits(model), expected)
    hooks = other.model.layers[0].mlp.up_proj._forward_hooks.values()
    next(hook.owner for hook in hooks if hasattr(hook, "owner")).detach()
    with torch.no_grad():
        for parameter in other.extra.parameters():
            parameter.fill_(1.0)
    assert torch.equal(logits(other), plain)
    assert torch.equal(logits(model), expected)


# -- which modules -------------------------------------------------------------------------------


def test_default_is_all_linear_modules_of_the_layers(tiny: Tiny) -> None:
    found = linear_modules(tiny("llama"))
    kinds = {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    }  # fmt: skip
    assert set(found) == {f"model.layers.{i}.{kind}" for i in range(3) for kind in kinds}
    assert linear_modules(tiny("llama"), "all-linear") == found
    assert {type(m) for m in linear_modules(tiny("gpt2")).values()} == {Conv1D}


@pytest.mark.parametrize(
    "targets",
    [["q_proj", "v_proj"], ["lm_head"], ["layers.1.mlp.up_proj"], r".*\.[02]\..*_proj", "lm_head"],
)
def test_targets_are_those_of_peft(tiny: Tiny, targets: Any) -> None:
    model = copy.deepcopy(tiny("llama"))
    found = linear_modules(model, targets)
    peft_model = get_peft_model(model, LoraConfig(target_modules=targets))
    theirs = set(peft_model.base_model.targeted_module_names)
    assert set(found) == theirs and theirs


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (["q_prj"], "'q_prj'"),
        (["q_proj", "embed_tokens"], "'embed_tokens'"),  # no linear module
        (r"layers\..*", r"'layers\\\\\.\.\*'"),  # a regular expression matches whole names
        ([], "''"),
    ],
)
def test_nothing_matches(tiny: Tiny, targets: Any, named: str) -> None:
    with pytest.raises(
        ValueError, match=rf"no linear module of LlamaFor.* matches {named}: .*q_pr"
    ):
        linear_modules(tiny("llama"), targets)


@pytest.mark.parametrize("pattern", ["(.|..)+[A-Z]", r"(?:(.|..)+)\1[A-Z]"])
def test_a_pattern_that_takes_for_ever(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """Seconds for each name, twice as many for each two letters more."""
    monkeypatch.setattr(modules, "PATTERN_SECONDS", 0.05)
    with pytest.raises(ValueError, match=r"takes longer than 0.05 seconds to .*a list of names"):
        linear_modules(tiny("llama"), pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (".*(", r"'\.\*\(' is no regular expression: missing \)"),
        ("(" * 500 + ")" * 500, "is no regular expression: maximum recursion depth"),
        ("a|" * 501, "has 1002 characters: at most 1000 are tried"),
    ],
)
def test_no_pattern(tiny: Tiny, pattern: str, message: str) -> None:
    model, limit = tiny("llama"), sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own; libraries raise it
    try:
        with pytest.raises(ValueError, match=message):
            linear_modules(model, pattern)
    finally:
        sys.setrecursionlimit(limit)


def test_modules_that_peft_has_wrapped(tiny: Tiny) -> None:
    model = copy.deepcopy(tiny("llama"))
    before = linear_modules(model)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert linear_modules(model) == before
    ours = linear_modules(model, ["q_proj"])
    assert set(ours) == {f"model.layers.{i}.self_attn.q_proj" for i in range(3)}


# -- merging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama_tied", "gpt2"])
def test_merge_and_exact_unmerge(tiny: Tiny, architecture: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny(architecture)).to(dtype)
    modules = linear_modules(model)
    factors = random_factors(modules)
    oracle = dense(model, factors)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = logits(model)
    update = LowRank(modules, factors.get)
    update.attach()
    update.merge(model)
    assert update.merged
    merged = model.state_dict()
    for name, value in oracle.state_dict().items():
        # fp32 and fp64 arithmetic may round to neighbours.
        close = {"rtol": 2**-7, "atol": 1e-4} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(merged[name], value, **close)
    assert not torch.equal(logits(model), plain)
    changed = logits(model)
    update.detach()
    assert torch.equal(logits(model), changed)  # hooks add nothing on top
    update.merge(model)  # once is enough
    update.unmerge()
    update.unmerge()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(logits(model), plain) and not update.merged


def test_unmerging_after_a_change_is_refused(tiny: Tiny) -> None:
    model = copy.deepcopy(tiny("llama"))
    update = LowRank(modules := linear_modules(model), random_factors(modules).get)
    update.merge(model)
    weight = modules["model.layers.1.mlp.up_proj"].weight
    weight.data += 1
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight has been changed since"):
        update.unmerge()
    assert update.merged


@pytest.mark.parametrize(
    ("architecture", "targets", "spoil", "message"),
    [
        ("llama_tied", "lm_head", None, "lm_head, which shares its weight with another module"),
        ("llama", None, lambda m: m.to("meta"), "q_proj, which has no weight in memory"),
        ("llama", None, lambda m: m.to(torch.float8_e4m3fn), r"is stored in torch\.float8_e4m3fn"),
    ],
)
def test_what_cannot_be_merged_into(
    tiny: Tiny, architecture: str, targets: Any, spoil: Any, message: str
) -> None:
    model = copy.deepcopy(tiny(architecture))
    modules = linear_modules(model, targets)
    factors = random_factors(modules)
    if spoil is not None:
        spoil(model)
    update = LowRank(modules, factors.get)
    with pytest.raises(ValueError, match=message):
        update.merge(model)
    assert not update.merged


def test_results_that_are_not_finite_can_be_refused(tiny: Tiny) -> None:
    model = copy.deepcopy(tiny("llama"))
    modules = linear_modules(model)
    factors = random_factors(modules)
    factors["model.layers.2.mlp.up_proj"].up[0, 0] = torch.nan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    update = LowRank(modules, factors.get)
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.up_proj\.weight that are not finite"):
        update.merge(model, check_finite=True)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not update.merged


def test_routers_of_experts_are_no_linear_modules() -> None:
    """Phi-3.5-MoE's derives from one, but returns a choice as well."""
    model = build("phimoe")
    assert any("router" in name for name, m in model.named_modules() if features(m) is not None)
    assert not any("router" in name for name in linear_modules(model))


# -- in some rows of a forward -------------------------------------------------------------------


def by_rows(model: PreTrainedModel, ids: Tensor, factors: dict[str, Factors], first: int) -> Tensor:
    """The oracle: logits where the rows from ``first`` on are updated, one at a time."""
    handles = []
    for name, (down, up, scale) in factors.items():

        def update(
            module: Any, args: Any, output: Tensor, update: Tensor = scale * up @ down
        ) -> Tensor:
            shape = (len(ids), ids.shape[1], -1)
            changed = output.clone().view(shape)
            for batch, row in itertools.product(range(len(ids)), range(first, ids.shape[1])):
                changed[batch, row] += update @ args[0].reshape(shape)[batch, row]
            return changed.view(output.shape)

        handles.append(model.get_submodule(name).register_forward_hook(update))
    try:
        return logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    ("architecture", "batch"), [(name, 1 + place % 2) for place, name in enumerate(ARCHITECTURES)]
)
def test_only_the_last_rows_are_updated(tiny: Tiny, architecture: str, batch: int) -> None:
    """The others are what they are without, bit for bit; also where a model flattens its rows."""
    model, ids = tiny(architecture), prompt(9, batch)
    modules = output_projections(model)
    assert len(modules) >= len(decoder_layers(model))
    factors = random_factors(modules)
    plain = logits(model, ids)
    for last in (3, 0, 9):
        with added(LowRank.add_to, LowRank(modules, factors.get), lambda rows=last: (9, rows)):
            found = [logits(model, ids) for _ in range(2)]
            slow = model(ids).logits  # with gradients, factors are not made ready
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0][:, : 9 - last], plain[:, : 9 - last])
        assert torch.equal(slow[:, : 9 - last], plain[:, : 9 - last])
        expected = by_rows(model, ids, factors, 9 - last)
        # fp32 in another order of operations, some layers deep.
        torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(slow, expected, rtol=1e-3, atol=1e-3)
        assert not last or (found[0] - plain)[:, -1].abs().max() > 0.1
    assert torch.equal(logits(model, ids), plain)


def test_a_module_that_sees_some_of_the_rows_is_refused() -> None:
    """Experts, for example."""
    module = nn.Linear(4, 6)
    update = LowRank({"expert": module}, random_factors({"expert": module}).get)
    with added(LowRank.add_to, update, lambda: (9, 3)):
        for x in (torch.randn(1, 4, 4), torch.randn(1, 12, 4)):
            with pytest.raises(ValueError, match=r"expert sees \d+ rows of a forward over 9: only"):
                module(x)


def test_output_projections(tiny: Tiny) -> None:
    """The last linear module of each layer; experts are left out."""
    last = {
        "llama": "mlp.down_proj",
        "gpt2": "mlp.c_proj",
        "opt": "fc2",
        "bloom": "mlp.dense_4h_to_h",
        "mixtral": "self_attn.o_proj",
    }
    for architecture, end in last.items():
        model = tiny(architecture)
        found = output_projections(model)
        assert len(found) == len(decoder_layers(model))
        assert all(name.endswith(end) for name in found)
        assert all(model.get_submodule(name) is module for name, module in found.items())
    model = copy.deepcopy(tiny("llama"))
    model.config.hidden_size = 7  # nothing has so many outputs
    with pytest.raises(ValueError, match=r"no linear module .* last of an attention or an MLP: na"):
        output_projections(model)
