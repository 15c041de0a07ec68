"""Low-rank updates of the drafting path: seen while drafting only, and learned from the full model.

The oracle of the drafting model is a copy of the model with the updates in its weights, made here
without our code, with layers left out.
"""

import gc
import pickle
from pathlib import Path
from typing import Any

import adapter_oracle
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from adapter_oracle import batch_of, hooked, random_answers, with_updates
from bit_sums import bit_sums
from conftest import Tiny, check_same, prompt, ragged
from running import CAPTURED, drafting
from step_by_hand import proposed
from test_layer_skip_drafter import Setting, draft_by_stock_cache, logits_behind
from torch import Tensor
from trained import answers, as_options
from transformers import PreTrainedModel

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.methods import layer_skip
from hf_spec.methods.registry import get_method
from hf_spec.modeling_patches.forwards import LayerSkipper
from hf_spec.modeling_patches.low_rank import _COPIES
from hf_spec.tools import cli

SKIP: dict[str, Any] = {"skip_attention": [0, 1], "skip_mlp": [1]}
FIXED = {"draft_exit": "fixed", "num_draft_tokens": 4}


def added(model: PreTrainedModel, **fields: Any) -> Any:
    config = hf_spec.LayerSkipConfig(**{**SKIP, "draft_rank": 4, **fields})
    return adapter_oracle.added(model, config, "mine")


# -- decoding ------------------------------------------------------------------------------------


def test_updates_are_of_what_drafting_runs(fresh: Tiny) -> None:
    model = fresh("llama")
    names = set(added(model).tensors())
    kinds = {0: ["mlp"], 2: ["mlp", "self_attn"]}  # layer 1 is left out, layer 0 half
    modules = {
        f"model.layers.{index}.{kind}.{name}_proj"
        for index, kinds in kinds.items()
        for kind in kinds
        for name in {"mlp": ("gate", "up", "down"), "self_attn": "qkvo"}[kind]
    }
    assert names == {part + m.replace(".", "__") for m in modules for part in ("down__", "up__")}
    assert hooked(model) == 0


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "qwen3"])
@torch.no_grad()
def test_drafts_are_those_of_the_updated_model(fresh: Tiny, architecture: str) -> None:
    model = fresh(architecture, dtype=torch.float64)
    adapter = added(model)
    oracle, row = with_updates(model, adapter), prompt(9)[0].tolist()
    drafter, setting = drafter_of(model), Setting(model, [row])
    drafter.start(setting.state)
    wanted, logits = draft_by_stock_cache(model, row, SKIP, 4, oracle)
    assert proposed(drafter, setting.state).tokens.tolist() == [[row[-1], *wanted]]
    # Without the updates others are drafted.
    assert not torch.equal(draft_by_stock_cache(model, row, SKIP, 1)[1][0], logits[0])
    assert hooked(model) == 0


def test_other_layers_are_drafted_without_the_updates(fresh: Tiny) -> None:
    model = fresh("llama")
    added(model)
    for options, skips in (({}, SKIP), ({"skip_mlp": [2]}, {"skip_mlp": [2]})):
        changes = drafter_of(model, **options).drafting, LayerSkipper(model, **skips).changes
        drafted, bare = (one.run(model, prompt()).logits for one in changes)
        assert torch.equal(drafted, bare) == bool(options)


# -- merged weights ------------------------------------------------------------------------------


def drafter_of(model: Any, **options: Any) -> Any:
    method = get_method("layer_skip")
    return method.make_drafter(model, method.parse_options({**FIXED, **options}))


def merged_as_by_hooks(model: Any) -> tuple[Any, Tensor]:
    """A drafter that has merged the updates, and its logits, after comparing these with those where
    the updates are added to outputs."""
    drafter, changes = drafter_of(model), LayerSkipper(model, **SKIP).changes
    assert drafter.details()["merged_bytes"] == 0  # nothing was drafted
    find_active(model, "LAYER_SKIP").update.add_to(changes)
    with torch.no_grad():
        merged, hooks = (one.run(model, prompt()).logits for one in (drafter.drafting, changes))
    # Some norms are computed in fp32.
    torch.testing.assert_close(merged, hooks, rtol=0, atol=1e-5)
    return drafter, merged


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt"])
def test_merged_weights_draft_what_updated_outputs_draft(fresh: Tiny, architecture: str) -> None:
    model = fresh(architecture, dtype=torch.float64)
    before, sums = model(prompt()).logits, bit_sums(list(model.parameters()))
    added(model)
    drafter, merged = merged_as_by_hooks(model)
    assert not torch.equal(merged, before)
    config = find_active(model, "LAYER_SKIP").config
    held = sum(m.weight.nbytes for m in config.draft_modules(model).values())
    assert drafter.details()["merged_bytes"] == held > 0
    # The model itself has neither another weight nor another output, bit for bit.
    model.delete_adapter("mine")
    assert torch.equal(model(prompt()).logits, before)
    assert bit_sums(list(model.parameters())) == sums


def test_copies_go_with_the_adapter_or_the_model(fresh: Tiny) -> None:
    # No copy of a model whose states an earlier test read: pickle refuses Transformers' hooks.
    model = type(fresh("llama"))(fresh("llama").config).eval()
    model.generation_config.eos_token_id = None  # whatever the weights that were drawn
    gc.collect()  # other tests' models
    before = len(_COPIES)
    for _ in range(2):
        added(model)
        model.generate(prompt(), max_new_tokens=4, **drafting("layer_skip", **FIXED))
        assert len(_COPIES) == before + 1
        assert len(pickle.dumps(model)) < 2 * sum(p.nbytes for p in model.parameters())
        model.delete_adapter("mine")
        gc.collect()
        assert len(_COPIES) == before
    added(model)
    drafter_of(model).drafting.run(model, prompt())
    del model
    gc.collect()
    assert len(_COPIES) == before


def test_modules_without_a_plain_weight_are_updated_by_hooks(fresh: Tiny) -> None:
    """A linear module of its own kind, and one that accelerate looks after."""

    class Own(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    model = fresh("llama", dtype=torch.float64)
    mlp = model.model.layers[2].mlp
    mlp.up_proj.__class__ = Own
    add_hook_to_module(mlp.down_proj, ModelHook())
    added(model)
    drafter, _ = merged_as_by_hooks(model)
    names = {name.rpartition(".")[2] for name in drafter.predictor.learned.weights if ".2." in name}
    assert names == {"gate_proj", "q_proj", "k_proj", "v_proj", "o_proj"}


def test_compiled_steps_have_merged_weights(fresh: Tiny) -> None:
    model = fresh("llama")
    adapter = added(model)

    def call(**way: Any) -> Any:
        spec = {**drafting("layer_skip", **FIXED), **way, "return_dict_in_generate": True}
        return check_same(model, spec, **ragged()).spec_stats

    first, again = call(**CAPTURED), call(**CAPTURED)
    assert first.details["compiled"]["made"] and again.details["compiled"]["made"] == 0
    assert again.accepted == first.accepted
    with torch.no_grad():  # draft what the model says, updates being gone
        for tensor in adapter.tensors().values():
            tensor.zero_()
    other = call(**CAPTURED)
    assert other.details["compiled"]["made"] and other.accepted == call().accepted
    for stats in (first, other):
        assert not stats.details["compiled"]["refused"]


# -- the loss ------------------------------------------------------------------------------------


def naive(model: Any, oracle: Any, batch: dict[str, Tensor]) -> Tensor:
    """One piece at a time behind the full model's own cache of the tokens before it."""
    rows = []
    for row, mask in enumerate(batch["attention_mask"].bool()):
        ids, labels = batch["input_ids"][row, mask], batch["labels"][row, mask]
        full = model(ids[None]).logits[0].double().log_softmax(-1)
        terms = []
        for anchor in sorted(set(batch["anchors"][row].tolist())):
            piece = ids[anchor + 1 : anchor + 1 + layer_skip.PIECE]
            if not len(piece):
                continue
            logits = logits_behind(model, ids[: anchor + 1], piece, SKIP, oracle)
            drafted = logits.double().log_softmax(-1)
            for at in range(len(piece)):
                place = anchor + 1 + at
                if place + 1 < len(ids) and labels[place + 1] != -100:
                    p, q = full[place], drafted[at]
                    terms.append((p.exp() * (p - q)).sum())
        rows.append(torch.stack(terms).mean())
    return torch.stack(rows).mean()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_loss_is_that_of_pieces_behind_the_full_models_cache(
    fresh: Tiny, architecture: str
) -> None:
    model = fresh(architecture, dtype=torch.float64)
    adapter = added(model)
    oracle = with_updates(model, adapter)
    batch = batch_of(random_answers(3, 14), 3)
    model.train()
    output = layer_skip.loss(model, adapter, TrainingBatch(**batch))
    assert model.training and hooked(model) == 0
    model.eval()  # gpt2 has dropout, which the loss runs without
    # The divergence is taken in fp32, and so are some norms.
    with torch.no_grad():
        torch.testing.assert_close(
            output["loss"].double(), naive(model, oracle, batch), rtol=1e-4, atol=1e-5
        )
    anchors = batch["anchors"].shape[1]
    assert output["logits"].shape == (3, anchors, 4, 61)
    assert output["labels"].shape == (3, anchors, 4)
    output["loss"].backward()
    for name, weight in adapter.tensors().items():
        assert weight.grad.abs().sum() > 0, name
    trained = {id(weight) for weight in adapter.tensors().values()}
    assert all(p.grad is None for p in model.parameters() if id(p) not in trained)


# -- training ------------------------------------------------------------------------------------


def test_the_command_refuses_what_would_train_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers().to_parquet(str(tmp_path / "rows.parquet"))
    for given, message in (
        ({"skip_attention": [1], "skip_mlp": [0]}, "draft_rank=0, skip_attention=[1]"),
        ({"draft_rank": 2}, "nothing to train"),
    ):
        options = as_options(checkpoint, tmp_path, **given)
        assert cli.main(["train", "layer_skip", "--output", str(tmp_path / "out"), *options]) == 2
        assert message in capsys.readouterr().err


# -- files ---------------------------------------------------------------------------------------


def test_bad_targets(fresh: Tiny) -> None:
    model = fresh("llama")
    for targets, message in (
        (["layers.1.mlp.up_proj"], "drafting leaves out all linear modules of that name"),
        (["query"], "no linear module of LlamaForCausalLM matches 'query'"),
    ):
        config = hf_spec.LayerSkipConfig(**SKIP, draft_rank=2, draft_target_modules=targets)
        with pytest.raises(ValueError, match=message):
            model.add_adapter(config)
        assert not hasattr(model, "spec_modules")
