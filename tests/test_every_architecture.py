"""Every causal language model of the installed Transformers with every strategy: the output is that
of plain generation, or the call is refused by an error that says what is in the way. Nothing else.

A run takes the pairs that once failed. All of them: ``make sweep``, or
``pytest tests/test_every_architecture.py --every-architecture``, which also takes
``-k llama-medusa``.
"""

import traceback
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import EXCLUDED, PADDED, REFUSED, build, model_types
from conftest import ragged
from running import needed
from test_method_contract import FIRST
from test_method_contract import adapted as with_adapter_of

from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.linear_attention import keeps_states

#: Pairs that once failed.
ALWAYS = [
    ("openai-gpt", "prompt_lookup"), ("modernbert-decoder", "medusa"), ("gemma4_text", "ppd"),
    ("gemma4_text", "space"), ("gemma3n_text", "propd"), ("jetmoe", "layer_skip"),
    ("inkling_text", "bita"), ("inkling_text", "mtp"), ("deepseek_v4", "bita"),
    ("nemotron_h", "bita"), ("zamba2", "bita"), ("git", "prompt_lookup"), ("phimoe", "space"),
    ("gemma3n_text", "bita"), ("gpt_neox_japanese", "prompt_lookup"),
    ("deepseek_v32", "layer_skip"), ("glm_moe_dsa", "propd"), ("dots3_note_text", "ppd"),
    ("llama4_text", "propd"), ("llama4", "space"), ("bart", "medusa"),
    ("moss_transcribe_diarize", "layer_skip"), ("whisper", "bita"), ("qwen3_5_text", "propd"),
    ("zaya", "layer_skip"), ("gemma4_text", "eagle3"), ("hy_v4", "eagle3"),
    ("rembert", "eagle3"), ("longcat_flash", "dflash"), ("mllama", "prompt_lookup"),
    ("doge", "token_recycling"),
]  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "layer_skip": {"skip_attention": [1], "skip_mlp": [2], "num_draft_tokens": 3},
    "propd": {"prune_top_k": 20, "prune": True},
}
NEW = 16
#: What is refused is known of this release; others have other models.
LISTED = transformers.__version__.startswith("5.24.")
OURS = [Path(__file__).parents[1] / name for name in ("hf_spec", "modeling_patches")]


def pairs(config: pytest.Config) -> list[tuple[str, str]]:
    every = [(kind, name) for kind in model_types() for name in methods()]
    if config.getoption("--every-architecture"):
        return every
    return [pair for pair in ALWAYS if pair in every]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        found = pairs(metafunc.config)
        metafunc.parametrize(("model_type", "name"), found, ids=["-".join(pair) for pair in found])


def prompts() -> list[dict[str, torch.Tensor]]:
    """One row alone, and three that are padded on the left."""
    batch = ragged()
    return [{"input_ids": batch["input_ids"][:1]}, batch]


GREEDY = {
    "max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True,
    "output_logits": True,
}  # fmt: skip


@cache
def plain(model_type: str) -> list[Any]:
    return [build(model_type).generate(**given, **GREEDY) for given in prompts()]


def adapted(model: Any, name: str) -> Any:
    return with_adapter_of(model, name, dict(FIRST)[name])


def test_exact_or_refused(model_type: str, name: str, record_property: Any) -> None:
    if model_type in EXCLUDED:
        record_property("outcome", f"not built: {EXCLUDED[model_type]}")
        pytest.skip(EXCLUDED[model_type])
    model = build(model_type)
    expected = plain(model_type)
    refusals = []
    for given, wanted in zip(prompts(), expected):
        options = {**OPTIONS.get(name, {}), "drafting": "always"}
        if name == "propd" and any(map(keeps_states, model.modules())):
            options = {"drafting": "always"}  # which are not pruned
        try:
            with adapted(model, name):
                found = model.generate(
                    **given, **GREEDY, assistant_strategy=name,
                    assistant_kwargs=options, **needed(name),
                )  # fmt: skip
        except ValueError as error:
            check_refusal(error, model)
            refusals.append(error)
            continue
        assert found.sequences.tolist() == wanted.sequences.tolist()
        for ours, theirs in zip(found.logits, wanted.logits):
            # fp32 in other orders of reduction, some layers deep.
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-3
    outcome = "exact"
    if refusals:
        outcome = f"refused{' with padding' * (len(refusals) == 1)}: {refusals[-1]}"
    record_property("outcome", outcome)
    if LISTED:
        assert bool(refusals) == (name in REFUSED.get(model_type, "").split()), outcome
        assert len(refusals) in (0, 2) or model_type in PADDED, outcome


def check_refusal(error: ValueError, model: Any) -> None:
    """It is ours, and names the architecture, or the part of it that is in the way."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    assert any(folder in raised_in.parents for folder in OURS), raised_in
    assert any(type(module).__name__ in str(error) for module in model.modules()), error
