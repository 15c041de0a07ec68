"""Quantized bases: every strategy gives plain decoding's output of the same quantized model.

torchao is no dependency of the project: importing peft imports it where it is installed, which
costs half a second and prints warnings. `make test-all` installs it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_oracle import added, randomise
from bit_sums import bit_sums
from conftest import Tiny, ragged, shared
from datasets import Dataset
from peft import get_peft_model
from running import CAPTURED, drafting
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

import hf_spec
from hf_spec.methods.registry import methods
from hf_spec.tools.training.train import train

torchao = pytest.importorskip("torchao.quantization", reason="needs torchao, see CONTRIBUTING.md")

#: Options of strategies that need some.
OPTIONS: dict[str, dict[str, Any]] = {"layer_skip": {"skip_attention": [1], "skip_mlp": [0]}}
#: Weight-only formats that torchao has code for on any CPU.
FORMS: dict[str, Callable[[], Any]] = {
    "int8": torchao.Int8WeightOnlyConfig,
    "int4": partial(torchao.IntxWeightOnlyConfig, weight_dtype=torch.int4),
    "float8": torchao.Float8WeightOnlyConfig,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("base")
    shared("llama").save_pretrained(made)
    return made


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    """Weights of linear modules in int8, all but the head's."""
    return quantized(folder)


def quantized(folder: Path, form: str = "int8") -> PreTrainedModel:
    config = TorchAoConfig(FORMS[form]())
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    ).eval()


def adapted(model: PreTrainedModel, name: str) -> list[list[int]]:
    """Give the model a method's adapter, if there is one; returns its tokens."""
    if methods()[name].needs_adapter:
        added(model, methods()[name].adapter_config(), std=0.1)
    return tokens(model)


def tokens(model: Any, **kwargs: Any) -> list[list[int]]:
    settings = {"max_new_tokens": 20, "do_sample": False, **kwargs}
    return model.generate(**ragged(), **settings).tolist()


@pytest.mark.parametrize("name", methods())
def test_greedy_equals_plain(model: PreTrainedModel, tiny: Tiny, name: str) -> None:
    plain = tokens(model)
    assert plain != tokens(tiny("llama"))  # int8 it is
    assert adapted(model, name) == plain
    assert tokens(model, **drafting(name, **OPTIONS.get(name, {}))) == plain
    drafted = hf_spec.last_stats(model).num_drafted_tokens
    assert bool(drafted) == methods()[name].drafter.drafts


@pytest.mark.parametrize(
    ("form", "name"),
    [("int8", "prompt_lookup"), ("int8", "layer_skip"), ("int8", "medusa"), ("int8", "space"),
     ("int4", "prompt_lookup"), ("float8", "prompt_lookup")],
)  # fmt: skip
def test_compiled_equals_plain(folder: Path, form: str, name: str) -> None:
    model = quantized(folder, form)
    plain = adapted(model, name)
    options = {"num_draft_tokens": 3} if methods()[name].needs_adapter else OPTIONS.get(name, {})
    assert tokens(model, **drafting(name, **options), **CAPTURED) == plain
    compiled = hf_spec.last_stats(model).details["compiled"]
    assert compiled["kept"] and not compiled["refused"]


TRAINED = {
    "bita": {"num_mask_tokens": 2, "num_prompt_tokens": 2},
    "space": {"num_mask_tokens": 2, "rank": 2},
    "layer_skip": {**OPTIONS["layer_skip"], "draft_rank": 2},
}


@pytest.mark.parametrize("name", TRAINED)
def test_training(model: PreTrainedModel, tmp_path: Path, name: str) -> None:
    rows = [
        {"prompt_ids": [4 + i % 4, 5], "answer_ids": [4 + (i + s) % 4 for s in range(12)]}
        for i in range(12)
    ]
    settings = {
        "max_steps": 6, "eval_steps": 3, "held_out": 2, "served_prompts": 1, "served_tokens": 4,
        "per_device_train_batch_size": 4, "num_anchors": 4, "learning_rate": 1e-2,
    }  # fmt: skip
    before = bit_sums(list(model.parameters()))
    record = train(model, Dataset.from_list(rows), name, tmp_path, TRAINED[name], settings)
    losses = [row["eval_loss"] for row in record["history"] if "eval_loss" in row]
    assert losses[-1] < losses[0]
    assert bit_sums(list(model.parameters())) == before


def test_what_changes_weights_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"update='full' changes .* are quantized \(torchao\)"):
        get_peft_model(model, hf_spec.SpaceConfig(update="full"))
    assert not hasattr(model, "spec_modules")
    peft_model = get_peft_model(model, hf_spec.SpaceConfig(update="lora"))
    before = tokens(model)
    randomise(peft_model, "SPACE", std=0.1)
    plain = tokens(model)
    assert plain != before
    assert tokens(model, **drafting("space")) == plain
    for merge in (peft_model.merge_adapter, peft_model.merge_and_unload):
        with pytest.raises(ValueError, match=r"cannot merge into .* is quantized"):
            merge()
    assert tokens(model) == plain
