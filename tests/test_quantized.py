"""Quantized bases: every strategy gives plain decoding's output of the same quantized model.

torchao is no dependency of the project: importing peft imports it where it is installed, which
costs half a second and prints warnings. `pip install --no-deps torchao` makes these tests run.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_oracle import randomise
from bit_sums import bit_sums
from conftest import Tiny, ragged
from datasets import Dataset
from peft import get_peft_model
from running import CAPTURED, every_step, needed
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

import hf_spec
from hf_spec.methods.registry import methods
from hf_spec.tools.training.train import train

torchao = pytest.importorskip(
    "torchao.quantization", reason="torchao is not installed; pip install --no-deps torchao"
)

#: Options of strategies that need some.
OPTIONS: dict[str, dict[str, Any]] = {"layer_skip": {"skip_attention": [1], "skip_mlp": [0]}}
NEW = 20
#: Weight-only formats that torchao has code for on any CPU.
FORMS: dict[str, Callable[[], Any]] = {
    "int8": torchao.Int8WeightOnlyConfig,
    "int4": partial(torchao.IntxWeightOnlyConfig, weight_dtype=torch.int4),
    "float8": torchao.Float8WeightOnlyConfig,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from conftest import _build

    folder = tmp_path_factory.mktemp("base")
    _build("llama", "sdpa", torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    """Weights of linear modules in int8, all but the head's."""
    return quantized(checkpoint)


def quantized(checkpoint: Path, form: str = "int8") -> PreTrainedModel:
    config = TorchAoConfig(FORMS[form]())
    loaded = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=config, dtype=torch.float32
    )
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    return loaded.eval()


def tokens(model: Any, inputs: Any = None, **kwargs: Any) -> list[list[int]]:
    settings = {"max_new_tokens": NEW, "do_sample": False, **every_step(kwargs)}
    return model.generate(**(inputs or ragged()), **settings).tolist()


@pytest.mark.parametrize("name", methods())
def test_greedy_equals_plain(model: PreTrainedModel, tiny: Tiny, name: str) -> None:
    method = methods()[name]
    base = tokens(model)
    assert base != tokens(tiny("llama"))  # int8 it is
    if method.needs_adapter:
        model.add_adapter(method.adapter_config())
        randomise(model, method.adapter_config.type_name, std=0.1)
    plain = tokens(model)
    assert plain == base
    kwargs = {"assistant_strategy": name, "assistant_kwargs": OPTIONS.get(name, {})}
    assert tokens(model, **kwargs, **needed(name)) == plain
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


def compiled(model: Any) -> dict[str, Any]:
    return hf_spec.last_stats(model).details["compiled"]


@pytest.mark.parametrize(
    ("form", "name"),
    [("int8", "prompt_lookup"), ("int8", "layer_skip"), ("int8", "medusa"), ("int8", "space"),
     ("int4", "prompt_lookup"), ("float8", "prompt_lookup")],
)  # fmt: skip
def test_compiled_equals_plain(checkpoint: Path, form: str, name: str) -> None:
    model, method = quantized(checkpoint, form), methods()[name]
    if method.needs_adapter:
        model.add_adapter(method.adapter_config())
        randomise(model, method.adapter_config.type_name, std=0.1)
    plain = tokens(model)
    options = {**OPTIONS.get(name, {}), **({"num_draft_tokens": 3} if method.needs_adapter else {})}
    kwargs = {"assistant_strategy": name, "assistant_kwargs": options}
    assert tokens(model, **kwargs, **CAPTURED) == plain
    assert compiled(model)["kept"] and not compiled(model)["refused"]


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
    assert tokens(model, assistant_strategy="space") == plain
    for merge in (peft_model.merge_adapter, peft_model.merge_and_unload):
        with pytest.raises(ValueError, match=r"cannot merge into .* is quantized"):
            merge()
    assert tokens(model) == plain
