"""Autocast around a call or inside a model's forward, as Trainer, TRL and accelerate use it.

Arithmetic is then bfloat16, and forwards over other numbers of tokens round differently. So the
models here are sure of each next token: a token's logit is several times as large as all others.
What follows a token is another one, whatever stands before it; the paths of masks and caches are
compared elsewhere, in float32.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from conftest import VOCAB, prompt, ragged
from covering import covering
from replay import RECORDED
from running import one_of_each_kind
from test_compiled import CAPTURED, adapt, compiled, generate, strategy
from transformers import DynamicCache

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.modeling_patches.modules import CACHE

pytestmark = pytest.mark.instructions

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


@pytest.fixture
def sure(shallow: Any) -> Callable[..., Any]:
    """A model of two layers that continues token t by t + 1, or by t - 6 after every seventh."""

    def make(architecture: str = "llama", name: str = "prompt_lookup") -> Any:
        model = shallow(architecture, layers=2)
        after = torch.arange(VOCAB)
        after = torch.where(after % 7 == 6, after - 6, (after + 1).clamp(max=VOCAB - 1))
        embeddings = model.get_input_embeddings().weight.data
        embeddings *= 100  # what the layers add is small beside it
        head = model.get_output_embeddings().weight.data
        head.zero_()
        head[after] = 4 * torch.nn.functional.normalize(embeddings)
        return adapt(model, name)

    return make


@pytest.mark.parametrize("name", one_of_each_kind())
def test_every_strategy(sure: Any, name: str) -> None:
    """Under autocast; and prepared by accelerate: it is on in the forward alone, whose outputs are
    float32."""
    model = sure(name=name)
    for settings in ({}, {"do_sample": True}):
        with torch.autocast(**BF16):
            torch.manual_seed(3)
            plain = generate(model, ragged((12, 5)), **settings).sequences
            torch.manual_seed(3)
            ours = generate(model, ragged((12, 5)), **settings, **strategy(name)).sequences
        assert torch.equal(ours, plain)
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # another test may have made one
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    plain = generate(model, ragged((12, 5))).sequences
    assert torch.equal(generate(model, ragged((12, 5)), **strategy(name)).sequences, plain)


@pytest.mark.parametrize(
    ("architecture", "name"),
    covering(
        product(["gpt2", "gpt_neox", "gemma3", "opt"], ["prompt_lookup", "space"]),
        lambda architecture, name: [architecture],
    ),
)
def test_architectures(sure: Any, architecture: str, name: str) -> None:
    """What is written to the cache in which dtype depends on them."""
    model = sure(architecture, name)
    with torch.autocast(**BF16):
        plain = generate(model, ragged((12, 5)))
        ours = generate(model, ragged((12, 5)), **strategy(name))
    assert torch.equal(ours.sequences, plain.sequences)
    for mine, theirs in zip(ours[CACHE].layers, plain[CACHE].layers):
        for name in ("keys", "values"):  # some releases hold values in the keys' dtype
            own, other = mine.views[name].dtype, getattr(theirs, name).dtype
            assert torch.promote_types(own, other) == other


@pytest.mark.parametrize(
    ("name", "cast_first", "kind"),
    covering(product(["prompt_lookup", "bita"], [True, False], [TreeCache, DynamicCache])),
)
def test_a_cache_goes_on_in_another_dtype(
    sure: Any, name: str, cast_first: bool, kind: type
) -> None:
    """It then holds both, like a DynamicCache: in the wider dtype, without loss."""
    model, turns = sure(name=name), []
    for spec in ({}, strategy(name)):
        cache, ids = DynamicCache(config=model.config), prompt(12)
        given = {} if spec and kind is TreeCache else {CACHE: cache}
        for cast in (cast_first, not cast_first, cast_first):
            with torch.autocast(**BF16, enabled=cast):
                found = generate(model, ids, **given, **spec)
            given = {CACHE: found[CACHE]}
            ids = torch.cat([found.sequences, prompt(4, seed=7)], dim=1)
        turns.append(found)
    assert torch.equal(turns[0].sequences, turns[1].sequences)
    for plain, ours in zip(*(turn[CACHE].layers for turn in turns)):
        assert plain.values.dtype == ours.values.dtype == torch.float32


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("name", "way", "wrapped", "around"),
    [
        ("prompt_lookup", CAPTURED, True, False), ("medusa", CAPTURED, False, True),
        ("medusa", RECORDED, True, False), ("prompt_lookup", RECORDED, False, True),
        ("medusa", RECORDED, True, True),
    ],
)  # fmt: skip
def test_compiled_and_recorded_steps(
    sure: Any, name: str, way: Any, wrapped: bool, around: bool
) -> None:
    """Code is for the dtypes that it was captured with, and contains no weight that was cast
    before."""
    model, inputs = sure(name=name), ragged((12, 5))
    model.requires_grad_()  # only the casts of such weights are kept
    first = generate(model, inputs, **strategy(name), **way)
    if wrapped:
        model.forward = torch.autocast(**BF16)(model.forward)
    with torch.autocast(**BF16, enabled=around):
        plain = generate(model, inputs).sequences
        for _ in range(2):
            ours = generate(model, inputs, **strategy(name), **way)
            assert torch.equal(ours.sequences, plain)
    assert compiled(ours)["kept"] > compiled(first)["kept"] and not compiled(ours)["refused"]
    assert compiled(ours)["runs"] and not compiled(ours)["made"]
    if wrapped:
        del model.forward
    again = generate(model, inputs, **strategy(name), **way)
    assert torch.equal(again.sequences, first.sequences) and not compiled(again)["made"]
