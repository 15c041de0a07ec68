"""Short prompts, short budgets, full contexts, other dtypes, compiled and dispatched models."""

import logging
import shutil
from collections.abc import Callable
from itertools import product
from typing import Any

import architectures
import pytest
import torch
from conftest import Tiny, check_same, plainly, prompt, ragged
from covering import covering
from running import drafting, family, one_of_each_kind
from test_compiled import adapt, strategy
from test_generate import emitted
from test_method_contract import runs_on
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_spec
from hf_spec.decoding import strategy as selfcheck
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches import attention_masks
from hf_spec.modeling_patches.modules import CACHE

Spec = dict[str, Any]

GREEDY = {"max_new_tokens": 16, "do_sample": False}


# -- lengths ---------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_prompt_of_one_token(tiny: Tiny, spec: Spec, architecture: str) -> None:
    model = tiny(architecture)
    check_same(model, spec, input_ids=prompt(1))
    check_same(model, spec, **ragged((1, 7, 1)))
    check_same(model, spec, input_ids=prompt(1), forced_bos_token_id=9)
    check_same(model, spec)  # the BOS token alone
    check_same(model, spec, input_ids=prompt().int())
    check_same(model, spec, input_ids=prompt(1), max_new_tokens=3.5)  # is 4 for Transformers


@pytest.mark.parametrize("inputs", [{"input_ids": prompt()}, ragged()], ids=["one", "batch"])
def test_one_or_two_new_tokens(tiny: Tiny, spec: Spec, inputs: dict[str, Any]) -> None:
    model = tiny()
    check_same(model, spec, **inputs, max_new_tokens=None, max_length=14)
    more = {"return_dict_in_generate": True, "output_scores": True}
    out = check_same(model, {**spec, **more}, **inputs, max_new_tokens=1)
    assert out.sequences.shape[1] == 13 and len(out.scores) == 1
    assert out.spec_stats.num_steps == out.spec_stats.mean_accepted_tokens == 1
    assert out[CACHE].host_lengths == ([12, 5, 9] if "attention_mask" in inputs else [12])


def test_eos_anywhere_in_a_draft(tiny: Tiny, spec: Spec) -> None:
    """Each token that is emitted serves as EOS once, so that it falls on every place of a draft."""
    model = tiny("gpt2" if spec["assistant_strategy"] == "prompt_lookup" else "llama_tied")
    free = model.generate(prompt(), **GREEDY, **spec, return_dict_in_generate=True)
    assert max(free.spec_stats.accepted_histogram) >= 3
    returned = {**spec, "return_dict_in_generate": True}
    for eos in set(free.sequences[0, 12:].tolist()):
        check_same(model, spec, input_ids=prompt(), eos_token_id=eos)
        out = check_same(model, returned, **ragged(), eos_token_id=eos, pad_token_id=50)
        ends = emitted(out.sequences[:, 12:], [eos])
        assert out[CACHE].host_lengths == [12 + ends[0] - 1, 5 + ends[1] - 1, 9 + ends[2] - 1]


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "llama"])
def test_context_filled_to_the_last_position(tiny: Tiny, spec: Spec, architecture: str) -> None:
    """128 positions: prompt and output fill them; a candidate behind them must not be looked up."""
    model = tiny(architecture)
    for width, new in ((112, 16), (125, 3), (127, 1)):
        check_same(model, spec, input_ids=prompt(width), max_new_tokens=new)
        check_same(model, spec, **ragged((width, 9, width - 3)), max_new_tokens=new)


# -- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_half_precision(tiny: Tiny, spec: Spec, architecture: str, dtype: torch.dtype) -> None:
    """A row may leave plain generation's only where the two best logits lie within rounding."""
    model = tiny(architecture, dtype=dtype)
    settings = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    # Three steps of rounding between two forwards of other widths, on logits of the largest size.
    slack = 8 * torch.finfo(dtype).eps
    plain = model.generate(**ragged(), **settings)
    ours = model.generate(**ragged(), **settings, **spec)
    assert ours.logits[0].dtype == torch.float32
    for row in range(3):
        differs = (plain.sequences[row] != ours.sequences[row]).nonzero()
        if len(differs):
            logits = plain.logits[int(differs[0]) - 12][row]
            first, second = logits.topk(2).values
            assert first - second <= slack * logits.abs().max()


# -- models that are wrapped, compiled or dispatched -----------------------------------------


def compile_layers(model: Any, **how: Any) -> None:
    for layer in model.model.layers:
        layer.compile(**how)


#: What a user compiles; the first as Transformers' guide does. The wrapper is another model.
COMPILED: dict[str, Callable[..., Any]] = {
    "forward": lambda model, **how: setattr(model, "forward", torch.compile(model.forward, **how)),
    "in place": lambda model, **how: model.compile(**how),
    "wrapper": torch.compile,
    "forward of the decoder": lambda model, **how: setattr(
        model.model, "forward", torch.compile(model.model.forward, **how)
    ),
    "wrapper of the decoder": lambda model, **how: setattr(
        model, "model", torch.compile(model.model, **how)
    ),
    "layers": compile_layers,
}


@pytest.mark.parametrize(("name", "part"), [*zip(one_of_each_kind(), COMPILED)])
def test_compiled_models(
    shallow: Any, name: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps are not compiled, of which one warning tells."""
    model = adapt(shallow(layers=2), name)
    given = {**ragged((12, 5)), "max_new_tokens": 8, "do_sample": False}
    plain = model.generate(**given)
    wrapper = COMPILED[part](model, backend="eager", dynamic=True)
    model = model if wrapper is None else wrapper
    for _ in range(2):
        assert torch.equal(model.generate(**given, **strategy(name)), plain)
    assert caplog.text.count("is compiled by torch.compile") == (part != "wrapper")
    assert hf_spec.last_stats(model) is not None
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "architecture"),
    covering(
        [case for case in product(methods(), ["llama", "gpt2"]) if runs_on(*case)],
        lambda name, architecture: [family(name), architecture],
    ),
)
def test_gradient_checkpointing(shallow: Any, name: str, architecture: str) -> None:
    """As in evaluation where the cache is kept without gradients, else refused by name."""
    model, spec = adapt(shallow(architecture, layers=2), name), strategy(name)
    given = {**ragged((12, 5)), **GREEDY}
    plain = model.generate(**given)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable()
    if torch.equal(model.generate(**given), plain):
        assert torch.equal(model.generate(**given, **spec), plain)
    else:  # each token from the one before it alone
        message = f"{type(model).__name__} is in training mode with gradient check.* model.eval"
        with pytest.raises(ValueError, match=message):
            model.generate(**given, **spec)
    for change in (model.eval, model.gradient_checkpointing_disable):
        change()
        assert torch.equal(model.generate(**given, **spec), plain)
        model.train()


def test_training_mode_and_dropout(
    fresh: Tiny, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both apply as in plain generation; a model that is checked is told to leave that mode."""
    model: Any = fresh().train()
    check_same(model, spec, **ragged())
    assert model.training
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    found = [model.generate(**ragged(), **GREEDY, **spec) for _ in range(2)]
    assert found[0].shape == found[1].shape and not torch.equal(*found)
    monkeypatch.setattr(selfcheck, "VERIFIED", frozenset())
    with pytest.raises(ValueError, match="is in training mode, in which dropout.*model.eval"):
        model.generate(**ragged(), **GREEDY, **spec)
    check_same(model.eval(), spec, **ragged())


def test_inference_mode(tiny: Tiny, spec: Spec) -> None:
    with torch.inference_mode():
        out = check_same(tiny(), {**spec, "return_dict_in_generate": True}, prompt())
        ids = torch.cat([out.sequences, prompt(4, seed=9)], dim=1)
        check_same(tiny(), {**spec, CACHE: out[CACHE]}, ids)
        out[CACHE].batch_repeat_interleave(2)
    check_same(tiny(), {**spec, CACHE: out[CACHE]}, ids.repeat(2, 1))  # outside of it


# -- attention back ends ---------------------------------------------------------------------


@pytest.mark.environment  # seconds of a C++ compiler
def test_flex_attention(tiny: Tiny) -> None:
    """As it is, compiled by Inductor: on a CPU that fails for trees and for padded prompts."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("Inductor compiles flex attention with a C++ compiler, and there is none")
    settings = {"input_ids": prompt(9, batch=2), **GREEDY, "max_new_tokens": 6}
    ours = tiny("llama", "flex_attention").generate(**settings, **drafting("prompt_lookup"))
    assert ours.tolist() == plainly(tiny("llama"), **settings).tolist()


def test_soft_capped_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which sdpa does not have: steps then run the model's own eager attention."""
    import transformers.integrations.flex_attention as integration
    from torch.nn.attention import flex_attention as flex

    def reference(query: Any, key: Any, value: Any, training: bool = False, **kwargs: Any) -> Any:
        return flex.flex_attention(query, key, value, **kwargs)

    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", reference)
    model: Any = architectures.build("gemma2")
    assert model.config.attn_logit_softcapping
    settings = {**ragged((9, 4)), **GREEDY}
    expected = model.generate(**settings)
    with torch._dynamo.config.patch(disable=True):
        model.set_attn_implementation("flex_attention")
        ours = model.generate(**settings, **drafting("prompt_lookup"))
    assert ours.tolist() == expected.tolist()


def test_flash_is_switched_to_sdpa_for_the_call(
    fresh: Tiny, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the kernels a prefill cannot run, so the switch is looked at by itself."""
    attention_masks._warn_switched.cache_clear()
    model = fresh("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    called: list[str] = []
    given = model, *torch.ones(3, 1, 1, 1, 1)  # a module, queries, keys and values
    monkeypatch.setattr(attention_masks, "is_users_attention", lambda name: False)
    monkeypatch.setattr(attention_masks, "attend", lambda *args, **_: called.append("ours") or args)
    monkeypatch.setitem(
        AttentionInterface._global_mapping, "flash_attention_2", lambda *_: called.append("own")
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            attention = attention_masks.TreeAttention(model)
            flash = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
            attention.changes.run(flash, *given)
            flash(*given)
            converted = attention.convert({"": torch.tensor([[[[True, False]]]])}, torch.half)
            assert converted.tolist() == [[[[0, -torch.inf]]]]
    assert called == ["ours", "own"] * 2
    assert model.config._attn_implementation == "flash_attention_2"
    warnings = [r.getMessage() for r in caplog.records if "flash_attention_2" in r.getMessage()]
    assert len(warnings) == 1 and "use sdpa instead" in warnings[0]


def test_flash_without_sdpa_is_refused(fresh: Tiny) -> None:
    model = fresh("stablelm")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(
        ValueError, match="flash_attention_2.*attn_implementation='sdpa' or 'eager'"
    ):
        attention_masks.TreeAttention(model)


@pytest.mark.parametrize("grouped", [False, True])
def test_no_score_outweighs_the_mask(tiny: Tiny, grouped: bool) -> None:
    """In float16 finite scores go beyond the smallest number that a mask could add."""
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal, module.training = 2, True, False
    q, k, v = (
        torch.ones(1, heads, n, 8, dtype=torch.half) for heads, n in ((4, 2), (2, 3), (2, 3))
    )
    k[:, :, 1:], v[:, :, 1:] = 6e4, 7.0
    seen = torch.tensor([True, False, False]).expand(1, 1, 2, 3)
    mask = attention_masks.TreeAttention(tiny()).convert({"": seen}, q.dtype)
    attend = attention_masks.attend if grouped else ALL_ATTENTION_FUNCTIONS["sdpa"]
    output, _ = attend(module, q, k, v, mask, scaling=1.0)
    assert torch.equal(output, torch.ones_like(output))
