"""``space``: its loss against one mask group per forward, decoding, and every operation of PEFT."""

from pathlib import Path
from typing import Any

import adapter_oracle
import pytest
import torch
from adapter_oracle import PAPERS, batch_of, random_answers, randomise, with_updates
from conftest import Tiny, prompt, ragged
from peft import get_peft_model
from running import every_step
from torch import Tensor
from transformers import PreTrainedModel

import hf_spec
from hf_spec.adapters.layer import layer_of
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.methods import space
from hf_spec.modeling_patches.modules import linear_modules
from hf_spec.tools.training.dataset import AnswerDataset, collate

GREEDY = {"max_new_tokens": 16, "do_sample": False}


def tuned(**fields: Any) -> hf_spec.SpaceConfig:
    """The paper's adapter: low-rank updates of the whole model."""
    return hf_spec.SpaceConfig(**{"update": "lora", **PAPERS, **fields})


def added(model: PreTrainedModel, name: str = "one", seed: int = 0, **fields: Any) -> Any:
    """The model with an adapter that changes it; returns the active adapter."""
    return adapter_oracle.added(model, tuned(**fields), name, seed=seed)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(prompt(9)).logits


def tokens(model: Any, **kwargs: Any) -> list[list[int]]:
    return model.generate(**ragged(), **GREEDY, **every_step(kwargs)).tolist()


# -- the loss ------------------------------------------------------------------------------------


def naive(model: Any, adapter: Any, batch: dict[str, Tensor]) -> tuple[list[float], list[float]]:
    """L_AR and L_SAR of each row, from plain forwards over one sequence each.

    For L_SAR one forward per anchor: the tokens up to it, then the mask tokens, causally.
    """
    masks = adapter.tensors()["masks"].expand(adapter.config.num_mask_tokens, -1)
    embed = model.get_input_embeddings()
    ar_losses, sar_losses = [], []
    for row in range(len(batch["input_ids"])):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row, :length]
        answer = [at for at in range(length) if batch["labels"][row, at] != -100]
        log_p = model(ids[None]).logits[0].double().log_softmax(-1)
        of_token = {at: -log_p[at - 1, ids[at]] for at in answer}  # y_t after y_<t
        ar_losses.append(torch.stack(list(of_token.values())).mean())
        per_anchor = []
        for anchor in sorted(set(batch["anchors"][row].tolist())):
            if anchor + 2 >= length:
                continue  # padding of the list of anchors
            sequence = torch.cat([embed(ids[: anchor + 1]), masks.to(embed.weight.dtype)])
            log_p = model(inputs_embeds=sequence[None]).logits[0].double().log_softmax(-1)
            terms = [of_token[at] for at in answer if at <= anchor + 1]
            terms += [
                -log_p[anchor + i, ids[anchor + i + 1]]
                for i in range(1, len(masks) + 1)
                if anchor + i + 1 < length
            ]
            per_anchor.append(torch.stack(terms).mean())
        sar_losses.append(torch.stack(per_anchor).mean())
    return ar_losses, sar_losses


@pytest.mark.parametrize(
    ("architecture", "shared_mask"),
    [("llama", False), ("gemma2", True), ("gpt2", False), ("gemma3", True)],
)
def test_the_loss_is_that_of_one_mask_group_per_forward(
    fresh: Tiny, architecture: str, shared_mask: bool
) -> None:
    """Values and gradients; gemma2 has a soft cap on its logits."""
    model = fresh(architecture, dtype=torch.float64)
    adapter = added(model, num_mask_tokens=3, p_ar=0.3, rank=2, shared_mask=shared_mask)
    batch = batch_of(random_answers(3, 11), 4)
    model.eval()
    output = space.loss(model, adapter, TrainingBatch(**batch))
    ar, sar = naive(model, adapter, batch)
    expected = torch.stack([0.3 * one + 0.7 * two for one, two in zip(ar, sar)]).mean()
    # Norms, some softmaxes are in fp32.
    torch.testing.assert_close(output["loss"], expected, rtol=1e-6, atol=1e-6)
    anchors = batch["anchors"].shape[1]
    assert output["logits"].shape == (3, anchors, 3, 61)
    assert output["labels"].shape == (3, anchors, 3)
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert len(parameters) == len(adapter.tensors())
    ours = torch.autograd.grad(output["loss"], parameters)
    theirs = torch.autograd.grad(expected, parameters)
    for one, two in zip(ours, theirs):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_in_training_a_sequence_has_one_of_the_two_losses(fresh: Tiny) -> None:
    model = fresh("llama", dtype=torch.float64)
    adapter = added(model, num_mask_tokens=2, p_ar=0.4)
    rows = random_answers(24, 11)
    model.train()
    data = AnswerDataset([{"prompt_ids": p, "answer_ids": a} for p, a in rows], num_anchors=4)
    chosen, alone = [], []
    for index in range(len(rows)):
        batch = collate([data[index]])
        with torch.no_grad():
            value = space.loss(model, adapter, TrainingBatch(**batch))["loss"]
            ar, sar = naive(model, adapter, batch)
        is_ar = torch.isclose(value, ar[0], rtol=1e-5)  # norms are in fp32
        is_sar = torch.isclose(value, sar[0], rtol=1e-5)
        assert is_ar != is_sar
        chosen.append(bool(is_ar))
        alone.append(float(value))
    # Binomial(24, 0.4), which leaves 2..18 with a probability below 1e-3; the draws are fixed.
    assert 2 <= sum(chosen) <= 18
    drawn = set()
    for epoch in range(12):  # other anchors are another draw
        data.set_epoch(epoch)
        batch = collate([data[len(rows) - 1]])
        useful = torch.ones_like(batch["anchors"], dtype=torch.bool)
        given = batch["input_ids"], batch["labels"], batch["anchors"], useful
        drawn.add(space._sar_share(adapter.config, True, *given).item())
    assert drawn == {0.0, 1.0}
    # In one batch, padded, each row has the loss that it has alone.
    with torch.no_grad():
        together = float(space.loss(model, adapter, TrainingBatch(**batch_of(rows, 4)))["loss"])
    assert together == pytest.approx(sum(alone) / len(alone), rel=1e-4)


# -- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}), ("gpt2", {"tree": "chain"}), ("mixtral", {"lookup": True}),
        ("gemma2", {"tree": "chain", "max_depth": 2}),
    ],
)  # fmt: skip
def test_decoding_equals_plain_decoding_of_the_fine_tuned_model(
    fresh: Tiny, architecture: str, options: dict[str, Any]
) -> None:
    model = fresh(architecture)
    base = tokens(model)
    adapter = added(model)
    plain = tokens(model)
    assert plain == tokens(with_updates(model, adapter)) != base
    assert tokens(model, assistant_strategy="space", assistant_kwargs=options) == plain
    model.disable_adapters()
    assert tokens(model) == base


# -- operations of PEFT --------------------------------------------------------------------------


def test_merging_and_other_adapters(fresh: Tiny) -> None:
    model = fresh("llama")
    plain = logits(model)
    peft_model = get_peft_model(model, tuned(), "one")
    randomise(peft_model, "SPACE", seed=1)
    first = logits(model)
    peft_model.add_adapter("two", tuned())
    peft_model.set_adapter("two")
    randomise(peft_model, "SPACE", seed=2)
    second = logits(model)
    with pytest.raises(ValueError, match=r"merging takes the one .* \['one'\]: .*two changes"):
        peft_model.merge_adapter(["one"])
    peft_model.merge_adapter(["two"])
    peft_model.set_adapter("one")  # takes the other out of the weights
    assert torch.equal(logits(model), first)
    peft_model.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        peft_model.delete_adapter("one")
    peft_model.unmerge_adapter()
    peft_model.delete_adapter("one")
    peft_model.set_adapter("two")
    assert torch.equal(logits(model), second)
    peft_model.merge_adapter()
    layer_of(model, "SPACE").delete_adapter("two")  # as Transformers' own does it
    assert torch.equal(logits(model), plain)


def test_a_loaded_adapter_is_merged_too(fresh: Tiny) -> None:
    """``merge_adapter`` of the package works where there is no PeftModel."""
    model = fresh("llama")
    added(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    unmerged = logits(model)
    for safe in (True, False):
        assert hf_spec.merge_adapter(model, safe_merge=safe)
        assert not hf_spec.merge_adapter(model)  # there is nothing left to merge
        # The same sums in another order: a rounding of fp32 per layer.
        torch.testing.assert_close(logits(model), unmerged, rtol=1e-4, atol=1e-3)
        assert tokens(model, assistant_strategy="space") == tokens(model)
        if safe:
            model.disable_adapters()
            model.enable_adapters()
        else:
            hf_spec.unmerge_adapter(model)
            hf_spec.unmerge_adapter(model)
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert torch.equal(logits(model), unmerged)


def test_what_cannot_be_merged(fresh: Tiny) -> None:
    for update in ("none", "gated"):
        model = get_peft_model(fresh("llama"), tuned(update=update))
        for merge in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(
                ValueError, match=r"merging takes the one active SPACE .* none changes them.*unload"
            ):
                merge()
    model = get_peft_model(fresh("llama"), tuned())
    weight = model.get_base_model().model.layers[1].mlp.up_proj.weight
    weight.requires_grad_(False)
    weight.data = weight.data.to(torch.int8)
    with pytest.raises(ValueError, match=r"cannot merge into .* is quantized .*of torch.int8"):
        model.merge_adapter()


def test_gradient_checkpointing_is_refused_where_it_would_be_wrong(fresh: Tiny) -> None:
    model = fresh("llama")
    adapter = added(model)
    model.config._attn_implementation_internal = "flash_attention_2"
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="gradient_checkpointing"):
        space.loss(model, adapter, TrainingBatch(**batch_of(random_answers(3, 11), 4)))


# -- configs -------------------------------------------------------------------------------------


#: On saving, PEFT matches patterns with embeddings by `re`, which nothing interrupts.
PATTERN = r".*\.1\..*[qv]_proj|(([a-z_.]+)+)+[A-Z]"


@pytest.mark.parametrize(
    ("architecture", "fields", "names"),
    [
        ("llama", {"update": "lora", "target_modules": PATTERN},
         ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]),
        ("llama", {"update": "none", "target_modules": PATTERN}, None),
        ("llama", {}, ["down_proj"]), ("mixtral", {}, ["o_proj"]),
        # c_proj is the end of two modules in each layer.
        ("gpt2", {}, [f"transformer.h.{layer}.mlp.c_proj" for layer in range(3)]),
    ],
)  # fmt: skip
def test_targets_are_recorded_by_name(
    fresh: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    architecture: str, fields: dict[str, Any], names: Any,
) -> None:  # fmt: skip
    """Another version may have another default; adapters that were trained with this one load."""
    model, again = fresh(architecture), fresh(architecture)
    model.add_adapter(hf_spec.SpaceConfig(**fields))
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("hf_spec.methods.space.output_projections", linear_modules)
    again.load_adapter(tmp_path)
    assert all(one.peft_config["default"].target_modules == names for one in (model, again))
    weights = [find_active(one, "SPACE").tensors() for one in (model, again)]
    assert weights[0].keys() == weights[1].keys()
