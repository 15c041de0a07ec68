"""Adapters of ours beside a fine-tune's: a LoRA, modules and tokens that it has trained."""

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import adapter_oracle
import pytest
import torch
from adapter_oracle import randomise
from conftest import Tiny, prompt, ragged
from covering import covering
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from running import drafting
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

import hf_spec
from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.methods.registry import methods
from hf_spec.predict.markov import DraftVocabulary, MarkovHead
from hf_spec.target.hidden_states import output_logits

#: Configs whose adapters draft with all that adapters can have.
CONFIGS: dict[str, Callable[[], Any]] = {
    "medusa": lambda: hf_spec.MedusaConfig(num_heads=2, markov_rank=2, draft_vocab_size=40),
    "own heads": lambda: hf_spec.MedusaConfig(num_heads=2, projection="own", markov_rank=2),
    "propd": lambda: hf_spec.ProPDConfig(num_heads=2, prune_layer=1),
    "bita": lambda: hf_spec.BitaConfig(num_mask_tokens=2, markov_rank=2),
    "space": lambda: hf_spec.SpaceConfig(num_mask_tokens=2, draft_vocab_size=40),
    "ppd": lambda: hf_spec.PPDConfig(num_prompt_tokens=2, head="vocabulary"),
    "layer_skip": lambda: hf_spec.LayerSkipConfig(skip_attention=[1]),
}
STRATEGY = {name: name for name in CONFIGS} | {"own heads": "medusa"}
#: What a fine-tune trains beside low-rank updates of layers.
LORAS: dict[str, dict[str, Any]] = {
    "layers": {},
    "tokens": {"trainable_token_indices": [5, 9, 17]},
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved embeddings": {"modules_to_save": ["embed_tokens"]},
    "updated head": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
}


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **fields})


@pytest.fixture(autouse=True)
def _peft_warns_of_second_adapters() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(model: nn.Module, name: str = "default") -> None:
    """Change what a fine-tune has trained, so that it matters."""
    torch.manual_seed(3)
    for key, parameter in model.named_parameters():
        if name in key.split(".") and "spec_modules" not in key:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)


def fine_tuned(model: Any, name: str = "default", **fields: Any) -> tuple[Any, list[list[int]]]:
    """A model with a LoRA that changes something, and what it generates."""
    tuned = get_peft_model(model, lora(**fields), name).eval()
    trained(tuned, name)
    return tuned, tokens(tuned)


def saved(fresh: Tiny, folder: Path, name: str, architecture: str = "llama") -> str:
    return adapter_oracle.saved(fresh(architecture), CONFIGS[name](), folder)


def tokens(model: Any, name: str | None = None, **inputs: Any) -> list[list[int]]:
    inputs = inputs or ragged()
    more = {} if name is None else drafting(STRATEGY.get(name, name))
    return model.generate(**inputs, max_new_tokens=10, do_sample=False, **more).tolist()


# ------------------------------------------------------------- what PEFT wraps around embeddings


#: Whatever a fine-tune has trained, on a model that has tied its embeddings or not.
TUNED = [
    ("llama", "layers"), ("llama", "tokens"), ("llama", "saved embeddings"),
    ("llama_tied", "tokens"), ("llama_tied", "saved head"), ("llama_tied", "updated head"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tuned_as", "name", "ours_first"),
    covering(
        product(TUNED, CONFIGS, [True, False]),
        lambda tuned_as, name, ours_first: [(name, ours_first), (tuned_as, ours_first)],
    ),
    ids=str,
)
def test_every_strategy_beside_a_fine_tune(fresh, tuned_as, name, ours_first):
    """In both orders of attaching."""
    (architecture, kind), config = tuned_as, CONFIGS[name]
    model = fresh(architecture)
    if ours_first:
        model.add_adapter(config(), "ours")
    tuned, expected = fine_tuned(model, **LORAS[kind])
    if not ours_first:
        model.add_adapter(config(), "ours")
        model.set_adapter(["default", "ours"])
    randomise(tuned, config().type_name)
    if name == "medusa":
        assert tokens(tuned) == expected, "the fine-tune is as before"
    assert tokens(tuned, name) == expected
    if kind != "layers":
        with tuned.disable_adapter():
            assert tokens(tuned) != expected


@pytest.mark.parametrize("kind", LORAS)
@pytest.mark.parametrize("architecture", ["llama", "llama_tied"])
def test_drafts_follow_the_fine_tunes_embeddings(fresh, architecture, kind):
    """Tables of a call are made of the embeddings as they are used, and anew when that changes."""
    model = fresh(architecture)
    model.add_adapter(CONFIGS["medusa"](), "ours")
    randomise(model, "MEDUSA")
    tuned = get_peft_model(model, lora(**LORAS[kind])).eval()
    weights = find_active(tuned, "MEDUSA").tensors()
    markov_head = MarkovHead.of(weights, model)
    hidden, previous = torch.randn(1, 3, 32), torch.tensor([[[5, 17], [9, 8]]])
    states, some = hidden[:, :2], torch.tensor([[[5, 6], [9, 4]]])

    def check() -> None:
        expected = output_logits(model, hidden)[..., weights["draft_vocabulary"]]
        torch.testing.assert_close(DraftVocabulary.of(weights, model)(hidden), expected)
        full = markov_head.logits(previous, states[:, :, None].expand(-1, -1, 2, -1))
        found = MarkovHead.of(weights, model).bias(previous, states, some)
        index = some[:, :, None].expand(-1, -1, 2, -1)
        torch.testing.assert_close(found, full.gather(3, index))

    check()
    trained(tuned)
    check()
    with tuned.disable_adapter():
        check()
    check()


# --------------------------------------------------------------------------- the ways to get there


@pytest.mark.parametrize("name", ["medusa", "bita", "layer_skip"])
def test_onto_the_base_of_a_peft_model_of_a_lora(fresh, tmp_path, name):
    folder, kind = saved(fresh, tmp_path / "ours", name), CONFIGS[name]().type_name
    tuned, expected = fine_tuned(fresh("llama"), **LORAS["saved head"])
    with pytest.raises(ValueError, match=r"type LORA loads no .* type .*: load it onto .*'ours'\)"):
        tuned.load_adapter(folder, adapter_name="ours")
    tuned.get_base_model().load_adapter(folder, adapter_name="ours")
    assert tuned.active_adapter == "default" and find_active(tuned, kind).name == "ours"
    assert tokens(tuned, name) == tokens(tuned) == expected
    frozen = find_active(tuned, kind).tensors().values()
    assert not any(weight.requires_grad for weight in frozen)
    assert any(p.requires_grad for n, p in tuned.named_parameters() if "lora_" in n)
    with tuned.disable_adapter():
        assert tokens(tuned) == tokens(fresh("llama"))
        if methods()[STRATEGY[name]].needs_adapter:
            with pytest.raises(ValueError, match=rf"needs an active adapter of type {kind}: act"):
                tokens(tuned, name)
    assert tokens(tuned, name) == expected


def test_a_peft_model_around_another(fresh, tmp_path):
    """`PeftModel.from_pretrained` takes a `PeftModel`, too."""
    folder = saved(fresh, tmp_path / "ours", "medusa")
    tuned, expected = fine_tuned(fresh("llama"), **LORAS["saved head"])
    with pytest.raises(ValueError, match="has an adapter named 'default', of type LORA: give thi"):
        PeftModel.from_pretrained(tuned, folder)
    assert tokens(tuned) == expected
    model = PeftModel.from_pretrained(tuned, folder, adapter_name="ours")
    assert tokens(model, "medusa") == tokens(tuned, "medusa") == expected
    assert set(model.peft_config) == {"default", "ours"}


def test_training_on_top_of_a_fine_tune(fresh, tmp_path):
    """Only ours is trained, and it learns from the fine-tuned model."""
    tuned, expected = fine_tuned(fresh("llama"), **LORAS["saved head"])
    tuned.save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(fresh("llama"), tmp_path)
    model = get_peft_model(model, CONFIGS["medusa"](), adapter_name="ours")
    changing = {name for name, part in model.named_parameters() if part.requires_grad}
    assert changing and all("spec_modules" in name for name in changing)
    ids = prompt(12, batch=2)
    anchors = torch.tensor([[2, 5], [3, 6]])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model(input_ids=ids, labels=ids, anchors=anchors).loss.backward()
    optimizer.step()
    assert tokens(model, "medusa") == tokens(model) == expected


def test_others_refusals_stay(fresh):
    """PEFT refuses other mixtures as before."""
    tuned = get_peft_model(fresh("llama"), lora())
    for other in (
        IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        CONFIGS["medusa"](),
    ):
        with pytest.raises(ValueError, match="Cannot combine adapters with different peft types"):
            tuned.add_adapter("other", other)


# -------------------------------------------------------------------- through Transformers' methods


def test_loaded_by_transformers(fresh, tmp_path):
    model: Any = fresh("llama")
    plain = tokens(model)
    model.add_adapter(lora(**LORAS["tokens"], **LORAS["saved head"]), adapter_name="ft")
    trained(model, "ft")
    expected = tokens(model)
    model.load_adapter(saved(fresh, tmp_path / "ours", "medusa"), adapter_name="ours")
    assert tokens(model, "medusa") == tokens(model) == expected
    model.set_adapter(["ft", "ours"])
    assert tokens(model, "medusa") == tokens(model) == expected
    model.set_adapter("ours")
    assert tokens(model, "medusa") == tokens(model) == plain
    model.add_adapter(CONFIGS["bita"](), adapter_name="bita")
    model.set_adapter(["bita", "ft"])
    assert tokens(model, "bita") == tokens(model) == expected
    # What the error says to call must not turn the LoRA off.
    with pytest.raises(ValueError, match=r"call set_adapter\(\['bita', 'ft', 'ours'\]\)"):
        tokens(model, "medusa")
    with pytest.raises(ValueError, match="could not be found: absent"):
        model.set_adapter(["ft", "absent"])
    model.delete_adapter("ours")
    assert tokens(model, "bita") == expected


# ------------------------------------------------------------------------------ saving and merging


def test_each_is_saved_by_itself(fresh, tmp_path):
    fresh("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    tuned, expected = fine_tuned(model, "ft", **LORAS["saved head"])
    model.load_adapter(saved(fresh, tmp_path / "made", "medusa"), adapter_name="ours")
    tuned.save_pretrained(tmp_path / "both")
    tuned.save_pretrained(tmp_path / "one", selected_adapters=["ours"])
    assert not (tmp_path / "one" / "ft").exists()
    made = (tmp_path / "made" / "adapter_model.safetensors").read_bytes()
    for folder in ("both/ours", "one/ours"):
        assert (tmp_path / folder / "adapter_model.safetensors").read_bytes() == made
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    alone.load_adapter(tmp_path / "both" / "ft", adapter_name="ft")
    alone.load_adapter(tmp_path / "one" / "ours", adapter_name="ours")
    assert tokens(alone, "medusa") == tokens(alone) == expected


@pytest.mark.parametrize("ours_first", [True, False])
def test_merging_the_lora(fresh, tmp_path, ours_first):
    folder = saved(fresh, tmp_path / "ours", "medusa")
    model: Any = fresh("llama")
    if ours_first:
        model.load_adapter(folder, adapter_name="ours")
    tuned, expected = fine_tuned(model, **LORAS["saved head"])
    if not ours_first:
        model.load_adapter(folder, adapter_name="ours")
    tuned.merge_adapter()
    assert tokens(tuned, "medusa") == tokens(tuned) == expected
    tuned.unmerge_adapter()
    assert tokens(tuned, "medusa") == tokens(tuned) == expected
    merged = tuned.merge_and_unload()
    assert set(merged.peft_config) == {"ours"} and merged.active_adapters() == ["ours"]
    assert tokens(merged, "medusa") == tokens(merged) == expected
    merged.save_pretrained(tmp_path / "merged")  # the model: ours is there for drafting
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    alone.load_adapter(folder)
    assert tokens(alone, "medusa") == tokens(alone) == expected


#: Of PEFT's types, what a tiny model needs; None for those that do not run on one: they put tokens
#: into the prompt, need numbers of tasks, a layout or a library of their own, or no cache, or are
#: refused.
FIELDS: dict[str, dict[str, Any] | None] = {
    **dict.fromkeys(
        (
            "ADAMSS", "ADAPTION_PROMPT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING",
            "POLY", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA",
        )
    ),
    "ADALORA": {"total_step": 10}, "C3A": {"block_size": 8}, "FOURIERFT": {"n_frequency": 10},
    "IA3": {"feedforward_modules": []}, "OFT": {"oft_block_size": 8}, "ROAD": {"group_size": 8},
    "TRAINABLE_TOKENS": {"token_indices": [3, 5], "target_modules": ["embed_tokens"]},
    "VBLORA": {"vector_length": 8}, "WAVEFT": {"n_frequency": 10},
}  # fmt: skip
TYPES = sorted(
    str(getattr(kind, "value", kind)) for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    if not issubclass(config, SpecPeftConfig)
)  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in TYPES if FIELDS.get(kind, {}) is not None])
def test_every_type_of_peft_after_a_drafter(shallow, kind):
    """Some types compare fields of theirs with those of every config on the model."""
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    fields = {"target_modules": ["q_proj", "v_proj"], **(FIELDS.get(kind) or {})}
    if "r" in config_class.__dataclass_fields__ and kind != "OFT":
        fields["r"] = 4
    model: Any = shallow("llama", layers=2)
    ours = hf_spec.MedusaConfig(num_heads=2, inference_mode=True)  # as one that is loaded
    adapter_oracle.added(model, ours, "ours")
    tuned = get_peft_model(model, config_class(task_type="CAUSAL_LM", **fields), "theirs").eval()
    assert set(model.peft_config) == {"ours", "theirs"}
    expected = tokens(tuned, input_ids=prompt(9))
    assert tokens(tuned, "medusa", input_ids=prompt(9)) == expected


# -------------------------------------------------------------------------- resized vocabularies


@pytest.mark.parametrize(
    ("name", "architecture"),
    [*((name, "llama_tied") for name in ("medusa", "bita", "ppd")), ("own heads", "opt")],
)
def test_a_vocabulary_that_grew(fresh, tmp_path, name, architecture):
    """An adapter fits before and after tokens are added; batches too, and when sampled."""
    folder = saved(fresh, tmp_path / "ours", name, architecture)
    for grown_first in (False, True):
        model: Any = fresh(architecture)
        torch.manual_seed(1)
        if grown_first:
            model.resize_token_embeddings(66)
        model.load_adapter(folder)
        if not grown_first:
            model.resize_token_embeddings(66)
        for inputs in (ragged(), {"input_ids": prompt(9)}):
            assert tokens(model, name, **inputs) == tokens(model, **inputs)
    sampled = []
    for more in ({}, drafting(STRATEGY[name])):
        torch.manual_seed(7)
        out = model.generate(prompt(9), max_new_tokens=12, do_sample=True, top_k=0, **more)
        sampled.append(out.tolist())
    assert sampled[0] == sampled[1]


#: Drafters with rows of their own for each token.
BLOCK = {"mask_token_id": 3, "num_layers": 1, "markov_rank": 2}
OWN_ROWS: dict[str, Callable[[], Any]] = {
    "eagle3": lambda: hf_spec.Eagle3Config(norm_output=True),
    "own embeddings": lambda: hf_spec.Eagle3Config(own_embeddings=True, mask_token_id=4),
    "gated": lambda: hf_spec.DSparkConfig(markov_head="gated", **BLOCK),
    "rnn": lambda: hf_spec.DSparkConfig(markov_head="rnn", confidence_head="markov", **BLOCK),
    "domino": lambda: hf_spec.DFlashConfig(markov_head="domino", **BLOCK),
    "dspine": lambda: hf_spec.DFlashConfig(markov_head="dspine", **BLOCK),
    "xpress": lambda: hf_spec.DFlashConfig(markov_head="xpress", **BLOCK),
    "lilicorr": lambda: hf_spec.DFlashConfig(markov_head="lilicorr", **BLOCK),
    "selector": lambda: hf_spec.DFlashConfig(markov_head="selector", head="own", **BLOCK),
    "heads": lambda: hf_spec.MedusaConfig(projection="own", markov_rank=2),
    "predictor": lambda: hf_spec.PPDConfig(num_prompt_tokens=2, head="vocabulary"),
}


@pytest.mark.parametrize("name", OWN_ROWS)
def test_rows_of_tokens_follow_a_vocabulary(fresh, name):
    """Attached drafters draft for a model that gains or loses tokens, and train on it."""
    config = OWN_ROWS[name]()
    for size in (70, 50):
        model: Any = fresh("llama")
        adapter_oracle.added(model, config)
        torch.manual_seed(1)
        model.resize_token_embeddings(size)
        ids = torch.randint(3, size, (2, 9))
        ids[0, 3] = size - 1
        method = methods()[config.strategy]
        for rows, sampling in ((2, {"do_sample": False}), (1, {"do_sample": True, "top_k": 0})):
            found = []
            for more in ({}, drafting(method.name)):
                torch.manual_seed(7)
                out = model.generate(ids[:rows], max_new_tokens=8, **sampling, **more)
                found.append(out.tolist())
            assert found[0] == found[1]
        rows = [(row[:3].tolist(), row[3:].tolist()) for row in ids]
        batch = adapter_oracle.batch_of(rows, num_anchors=2)
        adapter, given = find_active(model, config.type_name), TrainingBatch(**batch)
        assert method.objective(model, adapter, given)["loss"].isfinite()


class Streamed(list):
    """What a streamer gets."""

    def put(self, tokens: torch.Tensor) -> None:
        self.extend(tokens.flatten().tolist())

    def end(self) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (hf_spec.DFlashConfig(), r"mask_token_id=60.*0 to 29.*resize_token_embeddings\(61\)"),
        (hf_spec.Eagle3Config(mask_token_id=40), r"mask_token_id=40: .*_embeddings\(41\)"),
        *(
            (config(draft_vocab_size=40), r"predicts tokens 0 to 39; .* has 30.*_embeddings\(40\)")
            for config in (hf_spec.Eagle3Config, hf_spec.MedusaConfig, hf_spec.BitaConfig)
        ),
        (
            hf_spec.DSparkConfig(draft_vocab_size=40, mask_token_id=3),
            r"predicts tokens 0 to 39; .* has 30.*_embeddings\(40\)",
        ),
    ],
    ids=lambda one: getattr(one, "strategy", ""),
)
def test_lost_tokens_that_a_drafter_needs(fresh, config, said):
    """Refused before the first token, by the size that the vocabulary must have again."""
    model: Any = fresh("llama")
    adapter_oracle.added(model, config)
    model.resize_token_embeddings(30)
    ids, seen = prompt(9).clamp(max=29), Streamed()
    with pytest.raises(ValueError, match=said):
        model.generate(ids, max_new_tokens=4, streamer=seen, **drafting(config.strategy))
    assert len(seen) in (0, 9)
    model.resize_token_embeddings(61)
    assert tokens(model, config.strategy, input_ids=ids) == tokens(model, input_ids=ids)


def test_a_vocabulary_that_shrank(fresh, tmp_path):
    folder = saved(fresh, tmp_path / "ours", "medusa")
    model: Any = fresh("llama")
    model.resize_token_embeddings(50)
    with pytest.raises(ValueError, match=r"vocab_size=61.*add the missing .*_embeddings\(61\)"):
        model.load_adapter(folder)


def test_saving_on_a_grown_model(fresh, tmp_path):
    """PEFT would add the model's embeddings to the adapter's file."""
    fresh("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    model.resize_token_embeddings(66)
    tuned = get_peft_model(model, lora(), "ft")
    model.add_adapter(CONFIGS["own heads"](), "ours")
    tuned.save_pretrained(tmp_path / "both")
    for name, embeddings in (("ft", True), ("ours", False)):
        with safe_open(tmp_path / "both" / name / "adapter_model.safetensors", "pt") as file:
            assert any("embed_tokens" in key for key in file.keys()) == embeddings  # noqa: SIM118
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    again.resize_token_embeddings(66)
    again.load_adapter(str(tmp_path / "both" / "ours"), is_trainable=True)
    again.save_pretrained(tmp_path / "again")
    again = fresh("llama")
    again.resize_token_embeddings(66)
    again.load_adapter(str(tmp_path / "again"))
    assert tokens(again, "own heads") == tokens(again)
