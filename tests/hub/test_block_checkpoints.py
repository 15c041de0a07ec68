"""Released block drafters become adapters of DFLASH and DSPARK; what cannot be read is refused."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import multimodal
import pytest
import torch
from conftest import check_same, prompt
from released import Files, changed, check_refused, exported, imported, put, read, without, write
from running import drafting, proposals
from safetensors.torch import load_file
from trained import same
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation import candidate_generator

import hf_spec
from hf_spec.adapters.checkpoint import WEIGHTS
from hf_spec.adapters.loading import find_active
from hf_spec.predict.blocks import HEADS
from hf_spec.tools import cli
from hf_spec.tools.formats import blocks
from hf_spec.tools.transfer import import_adapter, importable, recognized

OURS = Path(__file__).parents[1] / "fixtures" / "drafters" / "block_diffusion"
GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}

NAMES = {
    "dflash": "dflash/tiny-llama-draft-vocab", "dflash2": "dflash2/tiny-llama",
    "dspark": "dspark/tiny-llama-gated", "xpress": "xpress2/tiny-qwen3-fill",
}  # fmt: skip
#: Those in SpecForge's layout.
SPECFORGE = {
    "jetspec": "jetspec/tiny-llama", "domino": "domino/tiny-llama-shift",
    "dspine": "dspine/tiny-qwen3", "lilicorr": "lilicorr/tiny-llama",
}  # fmt: skip
#: What the convolutions and the selector of DFlash 2 are called in all layouts.
OF_DFLASH_2 = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")


def strategy_of(kind: str) -> str:
    return "dspark" if kind == "dspark" else "dflash"


def released(kind: str) -> Files:
    return read(OURS / (NAMES | SPECFORGE)[kind] / "drafter")


def of_zlab(method: str, part: bool = True) -> Files:
    """The same in z-lab's layout, which is SpecForge's, too; or in DeepSpec's."""
    config, tensors = released(method)
    flat = {**config["transformer_layer_config"], "rope_theta": 10000.0, "num_target_layers": 8}
    del flat["rope_parameters"]
    own = {
        "target_layer_ids": [one - 1 for one in config["aux_hidden_state_layer_ids"]],
        "mask_token_id": config["mask_token_id"], "block_size": config["block_size"],
    }  # fmt: skip
    flat["architectures"] = ["DFlashDraftModel"]
    flat["draft_vocab_size"] = config["draft_vocab_size"]
    if method == "dflash2":
        own |= {name: config[name] for name in OF_DFLASH_2}
        flat["architectures"] = ["DFlash2DraftModel"]
    if method == "dspark":
        names = ("markov_rank", "markov_head_type", "enable_confidence_head")
        own |= {name: config[name] for name in (*names, "confidence_head_with_markov")}
        own |= {"projector_type": "dspark"} if part else {"num_anchors": 512}
        flat["architectures"] = ["DSparkDraftModel" if part else "Qwen3DSparkModel"]
    return {**flat, "dflash_config": own} if part else {**flat, **own}, tensors


def of_deepspec(method: str) -> Files:
    config, tensors = of_zlab(method, part=False)
    head = base_model().get_output_embeddings().weight.detach().clone()
    del tensors["confidence_head.proj.bias"]  # its head has none
    return config, {**tensors, "embed_tokens.weight": torch.ones(128, 64), "lm_head.weight": head}


def out_of_order(kind: str) -> Files:
    """The same with the tokens of the draft vocabulary in another order."""
    config, tensors = released(kind)
    places = torch.arange(len(tensors["d2t"]))
    ids = (tensors["d2t"] + places).flip(0)
    head = tensors["lm_head.weight"].flip(0).contiguous()
    return config, {**tensors, "d2t": ids - places, "lm_head.weight": head}


@cache
def base_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=8,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
        initializer_range=0.2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def adapter_of(folder: Path, method: str, files: Files) -> Any:
    """The adapter that a checkpoint becomes."""
    return find_active(imported(folder, method, files, base_model()), method.upper())


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("dflash", released), ("dflash", of_zlab), ("dflash", out_of_order), ("dflash2", released),
     ("dflash2", of_zlab), ("dspark", released), ("dspark", of_zlab), ("dspark", of_deepspec)],
)  # fmt: skip
def test_layouts(tmp_path, kind, layout):
    """All give the same adapter, which is recognized by its files."""
    method = strategy_of(kind)
    model = imported(tmp_path, method, layout(kind), base_model())
    adapter = find_active(model, method.upper())
    weights, tensors = adapter.tensors(), released(kind)[1]
    for name, tensor in tensors.items():
        if layout is of_deepspec and name == "confidence_head.proj.bias":
            assert not weights[name].any()
        elif name not in ("d2t", "t2d"):
            assert torch.equal(weights[name], tensor.float())
    if "d2t" in tensors:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        assert torch.equal(weights["draft_vocabulary"], ids)
    assert ("lm_head.weight" in weights) == ("d2t" in tensors)  # else it is the base's
    config = adapter.config
    assert config.layers == [2, 4, 6] and config.mask_token_id == 127
    assert config.block_size == 6 and config.sample_from_anchor == (method == "dspark")
    assert config.rope_parameters["rope_theta"] == 10000.0
    if kind == "dflash2":
        assert (config.markov_head, config.markov_rank, config.selector_top_k) == ("selector", 8, 4)
        assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
    ids = torch.randint(0, 127, (2, 9), generator=torch.Generator().manual_seed(1))
    check_same(model, drafting(method), ids, **GREEDY)


@pytest.mark.parametrize("place", ["dflash_config", None])
def test_scales(tmp_path, place):
    """A drafter for Muse Glimmer has them in ``dflash_config``."""
    config, tensors = of_zlab("dflash2")
    scales = {
        "input_embedding_scale": 2.0, "output_multiplier": 0.2, "final_logit_softcapping": 20.0
    }  # fmt: skip
    (config[place] if place else config).update(scales)
    found = adapter_of(tmp_path, "dflash", (config, tensors)).config
    assert (found.embedding_scale, found.logit_scale, found.logit_softcap) == (2.0, 0.2, 20.0)
    written, _ = exported(tmp_path, base_model())
    assert {name: written[name] for name in scales} == scales


@torch.no_grad()
def test_transformers_own_type(tmp_path):
    """Drafts of the imported adapter are those of the assistant in Transformers; the base's norm of
    its embeddings is left out there, too."""
    types = pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="older")
    if not hasattr(candidate_generator.DFlashTokenCandidateGenerator, "_get_noise_embeds"):
        pytest.skip("an older Transformers drafts from normed embeddings")
    base = multimodal.build("muse_glimmer")
    config = types.MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, block_size=5, mask_token_id=63, sliding_window=20,
        layer_types=["sliding_attention", "full_attention"], target_layer_ids=[0, 2],
    )  # fmt: skip
    assistant = types.MuseGlimmerAssistantModel(config).eval()
    for weights in assistant.parameters():
        torch.nn.init.normal_(weights, std=0.3)
    assistant.save_pretrained(tmp_path / "released")
    assert recognized(str(tmp_path / "released"))[0] == "dflash"
    model = copy.deepcopy(base)
    import_adapter(
        tmp_path / "released" / "model.safetensors", "dflash", model, tmp_path / "adapter"
    )
    model.load_adapter(str(tmp_path / "adapter"))
    ids = prompt(11).clamp(max=multimodal.HEAR - 1)

    with proposals(hf_spec.Drafter) as seen:
        model.generate(ids, **GREEDY, **drafting("dflash", tree="chain"))
    root, *drafted = seen[0][1].tokens[0].tolist()
    text = torch.cat([ids, torch.tensor([[root]])], dim=1)
    stock = candidate_generator.DFlashTokenCandidateGenerator(
        assistant, base.get_input_embeddings(), base.get_output_embeddings(),
        GenerationConfig(max_length=50),
    )  # fmt: skip
    outputs = base(ids, output_hidden_states=True)
    given = {"position_ids": torch.arange(12)[None], "attention_mask": torch.ones_like(text)}
    candidates, _ = stock.get_candidates(
        text, given, outputs, is_first_iteration=False, n_last_matches=0
    )
    assert drafted == candidates[0, 12:].tolist()
    check_same(model, drafting("dflash"), ids, **GREEDY)


def test_heads_of_ones_own_are_kept(tmp_path):
    """Unless they are the base's."""
    config, tensors = of_deepspec("dspark")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    weights = adapter_of(tmp_path, "dspark", (config, tensors)).tensors()
    assert torch.equal(weights["lm_head.weight"], tensors["lm_head.weight"])


def test_layers_that_no_config_names(tmp_path):
    """SpecForge spaces them evenly: 1, 9, 17, 25 and 33 of 36, by their outputs."""
    convert = importable("dflash")[1].convert
    config, tensors = of_zlab("dflash")
    del config["dflash_config"]["target_layer_ids"]
    config |= {"num_target_layers": 36, "num_hidden_layers": 5}
    tensors = {name: one for name, one in tensors.items() if "layers" not in name and name != "t2d"}
    layers = {name: one for name, one in of_zlab("dflash")[1].items() if ".0." in name}
    for place in range(5):
        tensors |= {name.replace(".0.", f".{place}."): one for name, one in layers.items()}
    tensors["fc.weight"] = torch.zeros(64, 5 * 64)
    fields, _ = convert(tensors, config)
    assert fields["layers"] == [2, 10, 18, 26, 34]


LAYERS = "transformer_layer_config"
BAD: list[tuple[Any, str, Any, str]] = [
    (released, "dspine", put("transfer_ready", torch.tensor(False)), "'transfer_ready' is false"),
    (released, "dspine", without("transfer_codes"), "no tensor 'transfer_codes'"),
    (released, "lilicorr", changed("dflash_config", lilicorr_enabled=False), "enabled=False in c"),
    (released, "lilicorr", changed("dflash_config", lilicorr_new=1), "lilicorr_new=1 in config.js"),
    (released, "lilicorr", changed("dflash_config", lilicorr_mlp_ratio="x"), "mlp_ratio='x'"),
    (released, "lilicorr", changed("dflash_config", lilicorr_factor_dim=9), "head.weight' has sh"),
    (released, "lilicorr", changed("dflash_config", lilicorr_logit_scale=None), "no lilicorr_logi"),
    (released, "lilicorr", changed("dflash_config", conv_kernel_size=0), "unknown tensor 'layers"),
    (released, "lilicorr", without("lilicorr.token_proj.bias"), "no tensor 'lilicorr.token_proj"),
    (released, "jetspec", changed(is_causal=False), "does not say whether blocks are causal: .*"),
    (released, "domino", changed("dflash_config", emb_dim=9), "embed_proj.0.weight' has shape"),
    (released, "xpress", changed(xpress_mlp_ratio="2"), "xpress_mlp_ratio in config.json"),
    (released, "xpress", changed(block_size=6), "refiner_head.mix_l' has shape"),
    (released, "dflash", changed(new_flag=True), "new_flag=True in config.json: it is not known"),
    (released, "dflash", changed(target_hidden_size=32), "target_hidden_size=32 in config.*None"),
    (released, "dflash2", without("conv_kernel_size"), "unknown tensor 'layers.0.attention_conv"),
    (released, "dflash2", changed(conv_kernel_size=3), "attention_conv.base_kernel' has shape"),
    (released, "dflash2", changed(conv_group_size=7), "conv_group_size=7: 64 features cannot"),
    (released, "dflash2", changed(selector_rank=9), "predecessor_codebook' has shape"),
    (released, "dflash2", changed(selector_top_k=0), "selector_top_k"),
    (released, "dflash2", without("candidate_selector.successor_codebook"), "no tensor 'candidate"),
    (of_zlab, "dflash2", changed("dflash_config", output_multiplier=0), "logit_scale=0: must be"),
    (of_zlab, "dflash", changed("dflash_config", input_embedding_scale=-1), "embedding_scale=-1"),
    (of_zlab, "dflash", changed(final_logit_softcapping="x"), "logit_softcap='x'"),
    (released, "dflash", changed(speculators_model_type="eagle3"), "that of no known layout"),
    (released, "dspark", changed(markov_head_type="lstm"), "markov_head='lstm'"),
    (released, "dspark", changed(markov_rank=9), "markov_w1.weight' has shape"),
    (released, "dflash", changed(aux_hidden_state_layer_ids=[2, 4, 9]), "numbered 0 to 8"),
    # Nothing says whether the last state is read before or after the final norm.
    (released, "dflash", changed(aux_hidden_state_layer_ids=[2, 4, 8]), r"states \[2, 4, 8\]"),
    (released, "dflash", changed(aux_hidden_state_layer_ids=[2, 4]), "'fc.weight' has shape"),
    (released, "dflash", changed(aux_hidden_state_layer_ids="2"), "no list of the base's layers"),
    (released, "dflash", changed(mask_token_id=128), "mask_token_id=128.*tokens 0 to 127"),
    (released, "dflash", without("mask_token_id"), "config.json has no mask_token_id"),
    (released, "dflash", without("transformer_layer_config"), "has no transformer_layer_config"),
    (released, "dflash", without("norm.weight"), "no tensor 'norm.weight'"),
    (released, "dflash", without("d2t"), "48 of 128 tokens .* no tensor 'd2t'"),
    (released, "dflash", put("d2t", torch.full((48,), 100)), "ids 100 to 147: .*0 to 127"),
    (released, "dflash", put("d2t", torch.zeros(48)), "'d2t' is of type torch.float32"),
    (released, "dflash", put("d2t", torch.zeros(40).long()), "names 40 tokens, expected 48"),
    (released, "dflash", put("extra", torch.zeros(1)), "unknown tensor 'extra'"),
    (released, "dflash", changed(LAYERS, hidden_size=32), "made for a model with hidden_size=32"),
    (released, "dflash", changed(LAYERS, head_dim="x"), "head_dim='x'"),
    (released, "dflash", changed(LAYERS, num_hidden_layers=3), "layers.2"),
    (of_zlab, "dflash", changed(is_causal=1), "does not say whether blocks are causal: .*1"),
    (of_zlab, "dflash", changed(num_target_layers=9), "num_hidden_layers=9"),
    (of_zlab, "dflash", changed("dflash_config", new=1), "new=1 in config.json: it is not known"),
    (of_zlab, "dflash", changed("dflash_config", projector_type="domino"), "has no emb_dim"),
    (of_zlab, "dflash", changed("dflash_config", projector_type="lstm"), "of no known layout"),
    (of_zlab, "dflash", changed(dflash_config=[1]), r"dflash_config=\[1\] in config.json"),
    (of_zlab, "dspark", changed("dflash_config", attention_mode="mla"), "attention_mode='mla'"),
    (of_deepspec, "dspark", changed(new_switch=True), "new_switch=True in config.json: it is"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "method", "change", "message"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_read(tmp_path, layout, method, change, message):
    files = layout(method)
    change(*files)
    check_refused(tmp_path, strategy_of(method), files, base_model(), message)


def test_the_users_word(tmp_path, capsys):
    """A file without the flag is bidirectional, unless who knows says otherwise."""
    config, tensors = released("jetspec")
    del config["dflash_config"]["causal_head"]
    path = write(tmp_path / "released", (config, tensors))
    base_model().save_pretrained(tmp_path / "base")
    command = ["import", str(path), "--model", str(tmp_path / "base"), "--output"]
    for word, causal in (([], False), (["--config", '{"causal": true}'], True)):
        output = tmp_path / f"{causal}"
        assert cli.main([*command, str(output), *word]) == 0
        written = json.loads((output / "adapter_config.json").read_text())
        assert written["causal"] is causal
    assert cli.main([*command, str(tmp_path / "c"), "--config", '{"casual": true}']) == 2
    assert "'dflash' has no option 'casual' (did you mean 'causal'?)" in capsys.readouterr().err


def test_the_wrong_type_and_no_config(tmp_path):
    path = write(tmp_path / "released", released("dspark"))
    with pytest.raises(ValueError, match="it is of type 'dspark': give --type dspark"):
        import_adapter(path, "dflash", base_model(), tmp_path / "adapter")
    (tmp_path / "released" / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json beside it"):
        import_adapter(path, "dspark", base_model(), tmp_path / "adapter")


# -- for other programs --------------------------------------------------------------------------


#: Fields that only record how a drafter was made, and those that speculators fills its own way.
RECORDED = {"auto_map", "transformers_version", "target_hidden_size", "dtype"}
RECORDED |= {"num_jacobi_passes"}  # here the chain that these end at is drafted
ITS_OWN = {"speculators_config", "sliding_window_non_causal", "transformer_layer_config"}


@pytest.mark.parametrize(
    ("kind", "form"),
    [*((kind, "speculators") for kind in (*NAMES, "jetspec")),
     *((kind, "sglang") for kind in (*SPECFORGE, "dspark", "dflash2"))],
)  # fmt: skip
def test_exported_and_imported_again(tmp_path, kind, form):
    """The same adapter, and in the layout it came in the same fields, values and tensors."""
    method, (config, tensors) = strategy_of(kind), released(kind)
    model = imported(tmp_path, method, (config, tensors), base_model())
    written, found = exported(tmp_path, base_model(), form)
    if (form == "sglang") == (kind in SPECFORGE):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], one.to(found[name])) for name, one in tensors.items())
        for part in ("dflash_config", "dspine_config", "transformer_layer_config"):
            if part in written and part in config:
                ours, theirs = written[part], config[part]
                known = ours.keys() & theirs.keys() if form == "sglang" else ours.keys()
                assert len(known) > 1 and all(ours[name] == theirs[name] for name in known)
    if kind in NAMES and form == "speculators":
        assert config.keys() - written.keys() <= RECORDED and not written.keys() - config.keys()
        assert all(written[x] == config[x] for x in written.keys() - ITS_OWN - RECORDED)
        ours, theirs = (one["speculators_config"]["proposal_methods"] for one in (written, config))
        assert ours == theirs
        assert written["sliding_window_non_causal"], "vLLM would run full attention causally"
    if kind == "lilicorr":
        assert written["architectures"] == config["architectures"]
        assert written["dflash_config"].keys() >= config["dflash_config"].keys()
    if kind in ("jetspec", "dspine"):
        flags = written["dflash_config"]["causal_head"], written["dflash_config"]["causal"]
        assert written["is_causal"] and flags == (True, True)
        assert not written.get("sliding_window_non_causal"), "vLLM would run it bidirectionally"
    again = imported(tmp_path / "again", method, (written, found), base_model())
    adapters = [find_active(one, method.upper()) for one in (model, again)]
    assert same(*(one.tensors() for one in adapters))
    before, after = (vars(one.config) | {"base_facts": None} for one in adapters)
    assert before == after


def test_what_the_config_does_not_say(tmp_path):
    """DSpine's config may look like DFlash's, and Domino's tensors may have a prefix."""
    config, tensors = released("dspine")
    del config["is_causal"], config["architectures"]
    found = adapter_of(tmp_path / "a", "dflash", (config, tensors)).config
    assert found.markov_head == "dspine" and found.causal
    config, tensors = released("domino")
    tensors = {
        f"logit_head.{name}" if name.startswith(("prefix_gru", "embed_proj")) else name: one
        for name, one in tensors.items()
    }
    del config["dflash_config"]["projector_type"], config["architectures"]
    found = adapter_of(tmp_path / "b", "dflash", (config, tensors)).config
    assert found.markov_head == "domino"


def test_early_names_of_lilicorr(tmp_path):
    """ModelOpt's first exports number the parts of MLPs; a width of 0 is the drafter's."""
    config, tensors = released("lilicorr")
    numbers = {"feature_norm": "feature_mlp.0", "feature_mlp.up_proj": "feature_mlp.1",
               "feature_mlp.down_proj": "feature_mlp.3"}  # fmt: skip
    for layer in ("lilicorr.layers.0", "lilicorr.layers.1"):
        numbers |= {f"{layer}.mlp.up_proj": f"{layer}.mlp.0"}
        numbers |= {f"{layer}.mlp.down_proj": f"{layer}.mlp.2"}
    early = {}
    for name, tensor in tensors.items():
        for new, old in numbers.items():
            name = name.replace(new, old) if name.startswith("lilicorr.") else name
        early[name] = tensor
    assert len(early.keys() - tensors.keys()) == 14
    expected = adapter_of(tmp_path / "a", "dflash", (config, tensors))
    found = adapter_of(tmp_path / "b", "dflash", (config, early))
    assert same(found.tensors(), expected.tensors())
    config["dflash_config"]["lilicorr_hidden_size"] = 0
    fields, _ = importable("dflash")[1].convert(tensors, config)
    assert fields["markov_width"] == 64


def test_lilicorr_without_convolutions(tmp_path):
    """The lattice is as wide as the drafter, and vLLM takes no size of groups alone."""
    model = copy.deepcopy(base_model())
    own = {"markov_head": "lilicorr", "markov_rank": 4, "markov_width": 64, "selector_top_k": 8}
    model.add_adapter(hf_spec.DFlashConfig(num_layers=1, draft_vocab_size=0, **own))
    model.save_pretrained(tmp_path / "adapter")
    config, tensors = exported(tmp_path, base_model(), "sglang")
    assert config["dflash_config"]["lilicorr_hidden_size"] == 64
    assert not any("conv" in name for name in (*config["dflash_config"], *tensors))
    assert "lilicorr.token_proj.weight" not in tensors
    again = adapter_of(tmp_path / "again", "dflash", (config, tensors))
    assert same(again.tensors(), find_active(model, "DFLASH").tensors())


def test_a_vocabulary_of_the_bases_rows_is_exported_with_them(tmp_path):
    model = copy.deepcopy(base_model())
    model.add_adapter(hf_spec.DFlashConfig(draft_vocab_size=20, num_layers=1))
    model.save_pretrained(tmp_path / "adapter")
    config, found = exported(tmp_path, base_model())
    head = base_model().get_output_embeddings().weight[:20]
    assert torch.equal(found["lm_head.weight"], head) and not found["d2t"].any()
    assert found["t2d"].tolist() == [True] * 20 + [False] * 108
    assert config["draft_vocab_size"] == 20 and config["sliding_window_non_causal"]


@pytest.mark.parametrize(
    ("given", "form", "message"),
    [
        ("domino", "speculators", "markov_head='domino': .*Give --format sglang"),
        ("lilicorr", "speculators", "markov_head='lilicorr': .*Give --format sglang"),
        ({"markov_rank": 4, "markov_head": "lilicorr", "selector_top_k": 6, "draft_vocab_size": 0},
         "sglang", "selector_top_k=6: of LiLiCorr SGLang takes one of .1, 2, 4, 8, 16"),
        ("xpress", "sglang", "markov_head='xpress': .*Give --format speculators"),
        ("dflash", "sglang", "draft_vocab_size=48: SGLang's block drafters draft all"),
        ({"sliding_layers": [0], "sliding_window": 8, "sliding_window_from": "query"},
         "speculators", "sliding_window_from='query': speculators counts"),
        ({"logit_scale": 0.5}, "speculators", "'output_multiplier': 0.5.: speculators knows such"),
        ({"conv_kernel_size": 2}, "speculators", "convolutions with a selector or lilicorr only"),
        ({"layers": [2, 8]}, "speculators", r"layers=\[2, 8\]: the last is the final state"),
        ({"confidence_head": "state"}, "sglang", "confidence_head='state': others know it beside"),
    ],
)  # fmt: skip
def test_what_formats_do_not_know(tmp_path, given, form, message):
    if isinstance(given, str):
        imported(tmp_path, "dflash", released(given), base_model())
    else:
        model = copy.deepcopy(base_model())
        model.add_adapter(hf_spec.DFlashConfig(**given))
        model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=message):
        exported(tmp_path, base_model(), form)
    assert not (tmp_path / "exported").exists()


def test_a_head_that_no_format_knows_is_not_exported_as_another(tmp_path, monkeypatch):
    """A new head has no row of ``KINDS`` before somebody writes one."""
    monkeypatch.delitem(blocks.KINDS, "domino")
    model = copy.deepcopy(base_model())
    model.add_adapter(hf_spec.DFlashConfig(num_layers=1, markov_head="domino", markov_rank=4))
    model.save_pretrained(tmp_path / "adapter")
    for form in ("speculators", "sglang"):
        with pytest.raises(ValueError) as error:
            exported(tmp_path, base_model(), form)
        assert not (tmp_path / "exported").exists()
        what, known = str(error.value).split("has one of ")
        assert what.startswith("markov_head='domino': other programs do not know such drafters.")
        assert {*known.removesuffix(", or markov_rank=0.").split(", ")} == {*HEADS} - {"domino"}


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("layout", [released, of_deepspec])
def test_the_base_is_not_loaded(tmp_path, layout, single):
    """Its config and the file with the embeddings are enough: a large base need not fit, and one
    that was saved without a tokenizer will do."""
    path = write(tmp_path / "released", layout("dspark"))
    folder = tmp_path / "base"
    base_model().save_pretrained(folder, max_shard_size="1GB" if single else "20KB")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    if not single:
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        for file in {*index.values()} - {index["lm_head.weight"]}:
            (folder / file).unlink()
    options = ["--type", "dspark", "--model", str(folder), "--output", str(tmp_path / "adapter")]
    assert cli.main(["import", str(path), *options]) == 0
    import_adapter(path, "dspark", copy.deepcopy(base_model()), tmp_path / "expected")
    found, expected = (load_file(tmp_path / name / WEIGHTS) for name in ("adapter", "expected"))
    assert same(found, expected) and "lm_head.weight" not in str(found.keys())
    made = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    wanted = json.loads((tmp_path / "expected" / "adapter_config.json").read_text())
    assert made == {**wanted, "base_model_name_or_path": str(folder)}


def test_a_base_that_is_not_there(tmp_path, capsys):
    path = write(tmp_path / "released", of_deepspec("dspark"))
    command = ["import", str(path), "--output", str(tmp_path / "adapter"), "--model"]
    base_model().config.save_pretrained(tmp_path / "base")
    for place, message in (
        (tmp_path / "none", "cannot load model '{}': there is no such folder"),
        (tmp_path, "cannot load model '{}': the folder has no config.json"),
        (tmp_path / "base", "the folder '{}' has none of model.safetensors, model.safe"),
    ):
        assert cli.main([*command, str(place)]) == 2
        assert message.format(place) in capsys.readouterr().err
