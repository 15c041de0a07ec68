"""Skipping sublayers equals zeroing their output projections, on every architecture we name."""

import copy
import re
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES as KNOWN
from conftest import VOCAB
from covering import covering
from recurrent_models import recurrent
from running import fingerprint, running
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
)

from hf_spec.modeling_patches.forwards import LayerSkipper
from hf_spec.modeling_patches.modules import CACHE, decoder_layers, mixers, mlps

LAYERS = 4

#: Those that a strategy can use, and what their configs may also say: (architecture, fields).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in KNOWN},
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "opt-post_norm": ("opt", {"do_layer_norm_before": False}),
    "falcon-7b": (
        "falcon", {"new_decoder_architecture": False, "parallel_attn": True, "multi_query": True},
    ),
    "falcon-11b": ("falcon", {"num_ln_in_parallel_attn": 1}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    # Not promised, but found by the same rules.
    "gpt_oss": ("mixtral", {"model_type": "gpt_oss", "head_dim": 8, "sliding_window": 5}),
    "glm4": ("qwen3", {"model_type": "glm4"}),
}  # fmt: skip

# Last weights before the residual stream, inside an attention or an MLP module (or the layer).
OUTPUTS = re.compile(
    r"(^|\.)(o_proj|c_proj|out_proj|dense|down_proj|dense_4h_to_h|fc2|fc_out|w2|output_linear)(\.weight|\.bias|_bias)?$"
)


def build(architecture: str, **changes: object) -> nn.Module:
    """A model that the test may change."""
    return copy.deepcopy(built(architecture, **changes))


@cache
def built(architecture: str, **changes: object) -> nn.Module:
    name, own = ARCHITECTURES[architecture]
    model_type, fields = KNOWN[name]
    fields = {**fields, **own, **changes}
    depth = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
    fields |= dict.fromkeys(depth & fields.keys(), LAYERS)
    if "layer_types" in fields:
        fields["layer_types"] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    config = AutoConfig.for_model(fields.pop("model_type", model_type), **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases and norms start at 0 and 1: make them matter
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def zero_outputs(module: nn.Module) -> None:
    hit = [p for name, p in module.named_parameters() if OUTPUTS.search(name)]
    assert hit, f"no output projection in {[n for n, _ in module.named_parameters()]}"
    for parameter in hit:
        parameter.data.zero_()


def reference(model: nn.Module, skip_attention: list[int], skip_mlp: list[int]) -> nn.Module:
    """The same model with the output projections of the skipped sublayers zeroed."""
    model = copy.deepcopy(model)
    layers = decoder_layers(model)
    for index in skip_attention:
        for mixer in mixers(layers[index]):
            zero_outputs(mixer)
    for index in skip_mlp:
        for mlp in mlps(layers[index]):
            zero_outputs(mlp)
        if not mlps(layers[index]):
            for parameter in layers[index].fc2.parameters():
                parameter.data.zero_()
    return model


def tokens(batch: int = 2, seq: int = 9) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(1))


CHOICES = {
    "attention": ([1, 2], []),
    "mlp": ([], [1, 3]),
    "mixed": ([0, 2], [1, 2]),
    "first_layer": ([0], [0]),
    "last_layer": ([LAYERS - 1], [LAYERS - 1]),
    "all": ([*range(LAYERS)], [*range(LAYERS)]),
}


@pytest.mark.parametrize(
    ("architecture", "choice"),
    covering(
        product(ARCHITECTURES, CHOICES),
        lambda architecture, choice: [
            (architecture, choice) if choice in ("mixed", "all") else choice
        ],
    ),
)
@torch.inference_mode()
def test_equals_zeroed_outputs(architecture, choice):
    model = build(architecture)
    skip_attention, skip_mlp = CHOICES[choice]
    plain = model(tokens()).logits
    expected = reference(model, skip_attention, skip_mlp)(tokens()).logits
    skipper = LayerSkipper(model, skip_attention, skip_mlp)
    left = []
    for _ in range(2):  # the second time takes the path without emptied layers
        cache = DynamicCache(config=model.config)
        with running(skipper.changes):
            logits = model(tokens(), **{CACHE: cache}, use_cache=True).logits
        # fp32 rounding only: zero contributions are exact, the orders of summation are the same.
        torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)
        written = [layer.get_seq_length() for layer in cache.layers]
        assert written == [0 if i in skip_attention else 9 for i in range(LAYERS)]
        left.append(fingerprint(model))
    assert (logits - plain).abs().max() > 1e-3, "the skipped sublayers should have mattered"
    assert torch.equal(model(tokens()).logits, plain)
    LayerSkipper(model, skip_attention, skip_mlp).changes.run(model, tokens())
    assert left == [fingerprint(model)] * 2, "another use adds nothing"


@torch.inference_mode()
def test_hooks_of_skipped_modules_do_not_run():
    """They expect other widths where an MLP is two modules of its layer."""
    model, skip = build("opt"), ([], [1])
    expected = reference(model, *skip)(tokens()).logits
    layer = decoder_layers(model)[1]
    for module in (layer.fc1, layer.fc2):
        wide = torch.ones(module.out_features)
        module.register_forward_hook(lambda module, args, output, wide=wide: output + wide)
    plain = model(tokens()).logits
    for _ in range(2):  # the second time as compiled code is left out
        logits = LayerSkipper(model, *skip).changes.run(model, tokens()).logits
        torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)
        layer.fc1.compile(backend="eager")
    assert not torch.allclose(plain, expected)


def no_attention(model):
    decoder_layers(model)[2].self_attn = None


def shared_cache(model):
    model.config.num_kv_shared_layers = 2


@pytest.mark.parametrize(
    ("skip", "change", "message"),
    [
        (([1, 4], []), None, r"skip_attention=\[1, 4\]: .* from 0 to 3\. .* correct 4\."),
        (([], [-1]), None, r"skip_mlp=\[-1\]: the model has 4 layers"),
        (([2], []), no_attention, r"layer 2 \(LlamaDecoderLayer\) has no attention"),
        (([1], []), shared_cache, "LlamaForCausalLM shares the KV .* last 2 layers"),
    ],
)
def test_what_cannot_be_skipped(skip, change, message):
    model = build("llama")
    if change is not None:
        change(model)
    with pytest.raises(ValueError, match=message):
        LayerSkipper(model, *skip)
    LayerSkipper(model, [], [1])


def test_unknown_architectures_are_refused():
    rwkv = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("rwkv", **rwkv))
    with pytest.raises(ValueError, match="decoder layers of RwkvForCausalLM.*found none"):
        LayerSkipper(model, [0], [])
    with pytest.raises(ValueError, match="decoder layers of Linear"):
        decoder_layers(nn.Linear(2, 2))
    t5 = AutoConfig.for_model("t5", vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=2)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        decoder_layers(AutoModelForSeq2SeqLM.from_config(t5))


@pytest.mark.parametrize(
    ("kind", "skip_attention", "skip_mlp"),
    [
        ("qwen3_5_text", [0, 2], [2]), ("kimi_linear", [0, 2, 3], [1]), ("lfm2", [1, 2], [1]),
        ("falcon_h1", [1, 3], [3]), ("zamba2", [0, 2], []), ("granitemoehybrid", [0, 1], [0]),
        ("mamba2", [1], []), ("nemotron_h", [0, 1], [2]),
    ],
)  # fmt: skip
@torch.inference_mode()
def test_recurrences_are_skipped_as_attention_is(kind, skip_attention, skip_mlp):
    """Side by side with it, too; what is named alike and is an MLP is skipped as such."""
    model = recurrent(kind)
    plain = model(tokens()).logits
    expected = reference(model, skip_attention, skip_mlp)(tokens()).logits
    skipper = LayerSkipper(model, skip_attention, skip_mlp)
    for _ in range(2):
        torch.testing.assert_close(skipper.changes.run(model, tokens()).logits, expected)
    assert not torch.allclose(expected, plain, atol=1e-3)


def test_layers_without_one_of_the_two():
    for kind, skip, what in (("mamba2", ([], [1]), "MLP"), ("nemotron_h", ([2], []), "attention"),
                             ("zamba2", ([1], []), "attention")):  # fmt: skip
        with pytest.raises(ValueError, match=f"has no {what} submodule to skip"):
            LayerSkipper(recurrent(kind), *skip)
