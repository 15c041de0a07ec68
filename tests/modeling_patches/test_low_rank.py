"""Low-rank updates by hooks equal dense updates of the weights, and leave no trace.

The oracle is a copy of the model whose weights are W + scale * B A, made here without our code.
"""

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from adapter_oracle import Opaque
from conftest import ARCHITECTURES, Tiny, prompt
from running import added, fingerprint
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_spec.modeling_patches.low_rank import Factors, LowRank
from hf_spec.modeling_patches.modules import decoder_layers, linear_modules, output_projections
from hf_spec.modeling_patches.weights import features

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
    # Another order of operations, in fp32 for mixtral and some norms.
    torch.testing.assert_close(updated, expected, rtol=1e-4, atol=1e-4)
    assert (updated - plain).abs().max() > 0.1
    assert torch.equal(logits(model), plain)


def test_only_input_and_output_of_a_module_are_used() -> None:
    module, x = Opaque(nn.Linear(4, 6)), torch.randn(3, 4)
    factors = random_factors({"": module})
    update = LowRank({"": module}, factors.get)
    plain = module(x)
    with added(LowRank.add_to, update):
        down, up, scale = factors[""]
        torch.testing.assert_close(module(x), plain + scale * x @ down.T @ up.T)
    with pytest.raises(ValueError, match=r"cannot merge into .* is a Opaque.*unmerged"):
        update.merge(module)


# -- on and off ----------------------------------------------------------------------------------


def test_switching_leaves_no_trace(tiny: Tiny) -> None:
    """Attached or for one call, also both and several; a second use adds nothing to the model."""
    model = copy.deepcopy(tiny("llama"))
    before, plain, modules = fingerprint(model), logits(model), linear_modules(model)
    one, two = (LowRank(modules, random_factors(modules, seed=s).get) for s in (0, 1))
    one.attach()
    first = logits(model)
    one.attach()  # once is enough
    assert torch.equal(logits(model), first) and not torch.equal(first, plain)
    two.attach()
    both = logits(model)
    two.detach()
    assert torch.equal(logits(model), first) and not torch.equal(both, first)
    one.detach()
    one.detach()
    assert torch.equal(logits(model), plain) and fingerprint(model) == before
    left = []
    for _ in range(2):
        with added(LowRank.add_to, one):
            assert torch.equal(logits(model), first)
            with added(LowRank.add_to, two):
                assert torch.equal(logits(model), both)
        assert torch.equal(logits(model), plain)
        left.append(fingerprint(model))
    assert left[0] == left[1]


# -- merging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama_tied", "gpt2"])
def test_merge_and_exact_unmerge(tiny: Tiny, architecture: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny(architecture)).to(dtype)
    modules = linear_modules(model)
    factors = random_factors(modules)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    oracle = dense(model, factors).state_dict()
    update = LowRank(modules, factors.get)
    update.attach()
    update.merge(model)
    assert update.merged
    for name, value in model.state_dict().items():
        # fp32 and fp64 arithmetic may round to neighbors.
        close = {"rtol": 2**-7, "atol": 1e-4} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(value, oracle[name], **close)
    changed = logits(model)
    update.detach()
    assert torch.equal(logits(model), changed)  # hooks add nothing on top
    update.merge(model)  # once is enough
    update.unmerge()
    update.unmerge()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not update.merged

    update.merge(model)
    name, weight = next((name, module.weight) for name, module in modules.items())
    weight.data += 1
    with pytest.raises(ValueError, match=rf"{name}\.weight has been changed since"):
        update.unmerge()
    assert update.merged


def spoiled_factors(model: Any, factors: Any) -> None:
    factors["model.layers.2.mlp.up_proj"].up[0, 0] = torch.nan


@pytest.mark.parametrize(
    ("architecture", "targets", "spoil", "message"),
    [
        ("llama_tied", "lm_head", None, "lm_head, which shares its weight with another module"),
        ("llama", None, lambda m, f: m.to("meta"), "q_proj, which has no weight in memory"),
        ("llama", None, lambda m, f: m.to(torch.float8_e4m3fn), r"stored in torch\.float8_e4m3fn"),
        ("llama", None, spoiled_factors, r"layers\.2\.mlp\.up_proj\.weight that are not finite"),
    ],
)
def test_what_cannot_be_merged_into(
    tiny: Tiny, architecture: str, targets: Any, spoil: Any, message: str
) -> None:
    model = copy.deepcopy(tiny(architecture))
    modules = linear_modules(model, targets)
    factors = random_factors(modules)
    if spoil is not None:
        spoil(model, factors)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    update = LowRank(modules, factors.get)
    with pytest.raises(ValueError, match=message):
        update.merge(model, check_finite=True)
    assert not update.merged
    if spoil is spoiled_factors:
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# -- in some tokens of a forward -----------------------------------------------------------------


@contextmanager
def last_tokens_updated(model: Any, factors: dict[str, Factors], shape: Any, first: int) -> Any:
    """The oracle: hooks that update the tokens from ``first`` on."""
    handles = []
    for name, (down, up, scale) in factors.items():

        def hook(module: Any, args: Any, output: Tensor, dense: Tensor = scale * up @ down) -> Any:
            changed = output.clone().view(*shape, -1)
            changed[:, first:] += args[0].reshape(*shape, -1)[:, first:] @ dense.T
            return changed.view(output.shape)

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    ("architecture", "batch"), [(name, 1 + place % 2) for place, name in enumerate(ARCHITECTURES)]
)
def test_only_the_last_tokens_are_updated(tiny: Tiny, architecture: str, batch: int) -> None:
    """The others are what they are without, bit for bit; also where a model flattens the batch."""
    model, ids = tiny(architecture), prompt(9, batch)
    modules = output_projections(model)
    assert len(modules) >= len(decoder_layers(model))
    factors = random_factors(modules)
    plain = logits(model, ids)
    for last in (3, 0, 9):
        with last_tokens_updated(model, factors, ids.shape, 9 - last):
            expected = logits(model, ids)
        with added(LowRank.add_to, LowRank(modules, factors.get), lambda last=last: (9, last)):
            for found in (logits(model, ids), logits(model, ids), model(ids).logits):
                assert torch.equal(found[:, : 9 - last], plain[:, : 9 - last])
                # fp32 in another order of operations, some layers deep.
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
                assert not last or (found - plain)[:, -1].abs().max() > 0.1


def test_a_module_that_sees_some_of_the_tokens_is_refused() -> None:
    """Experts, for example."""
    module = nn.Linear(4, 6)
    update = LowRank({"expert": module}, random_factors({"expert": module}).get)
    with added(LowRank.add_to, update, lambda: (9, 3)):
        for x in (torch.randn(1, 4, 4), torch.randn(1, 12, 4)):
            with pytest.raises(ValueError, match=r"expert sees \d+ tokens of a forward over 9"):
                module(x)
