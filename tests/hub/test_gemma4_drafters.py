"""Drafters that DeepSpec trains for Gemma 4, whose layers are those of Gemma 4.

What they compute is written down a second time here, after DeepSpec's description of them.
"""

import copy
from collections.abc import Callable
from typing import Any

import architectures
import pytest
import torch
from conftest import check_same, prompt
from released import Change, Files, changed, check_refused, imported, without
from running import drafting
from torch import Tensor
from torch.nn import functional

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.adapters.tuner import TrainingBatch
from hf_spec.methods.eagle3 import Eagle3Network
from hf_spec.methods.registry import methods
from hf_spec.predict.blocks import block_sequences
from hf_spec.predict.losses import unrolled
from hf_spec.target.sequences import token_hidden
from hf_spec.tools.transfer import export_adapter

#: Rounding of float32.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HIDDEN, INNER, HEADS, DIM, EPS = 32, 48, 4, 16, 1e-6
THETA, TURNED, CAP, BLOCK, READ = 1000.0, 0.5, 3.0, 5, [0, 2]


def base() -> Any:
    """A Gemma 4 of four layers."""
    return copy.deepcopy(architectures.build("gemma4_text"))


def released(kind: str, equal: bool = True) -> Files:
    """A checkpoint as DeepSpec writes it: the base's text config with fields changed.

    Args:
        kind: ``dspark``, ``dflash`` or ``eagle3``.
        equal: whether values are keys.
    """
    model = base()
    config, vocab = model.config.to_dict(), model.config.vocab_size
    config.pop("per_layer_config", None)  # DeepSpec's Transformers has the next two instead
    config |= {
        "global_head_dim": DIM, "num_global_key_value_heads": 1, "attention_k_eq_v": equal,
        "model_type": "gemma4_unified_text", "target_model_type": "gemma4_unified",
        "target_text_model_type": "gemma4_unified_text", "enable_moe_block": False,
        "hidden_size_per_layer_input": 0, "num_target_layers": 4, "tie_word_embeddings": False,
        "final_logit_softcapping": CAP, "target_layer_ids": READ,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": TURNED, "rope_theta": THETA
            },
        },
    }  # fmt: skip
    count = 1 if kind == "eagle3" else 2
    config |= {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}
    shapes = {
        "fc.weight": (HIDDEN, len(READ) * HIDDEN), "norm.weight": (HIDDEN,),
        ("layers.0." * (kind == "eagle3")) + "hidden_norm.weight": (HIDDEN,),
    }  # fmt: skip
    width, groups = HIDDEN * (1 + (kind == "eagle3")), 1 if equal else 2
    for layer in range(count):
        shapes |= {f"layers.{layer}.{name}": one for name, one in {
            "self_attn.q_proj.weight": (HEADS * DIM, width), "self_attn.q_norm.weight": (DIM,),
            "self_attn.k_proj.weight": (groups * DIM, width), "self_attn.k_norm.weight": (DIM,),
            **({} if equal else {"self_attn.v_proj.weight": (groups * DIM, width)}),
            "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM), "layer_scalar": (1,),
            "mlp.gate_proj.weight": (INNER, HIDDEN), "mlp.up_proj.weight": (INNER, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, INNER), **{f"{norm}_layernorm.weight": (HIDDEN,)
            for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward")},
        }.items()}  # fmt: skip
    if kind == "eagle3":
        config |= {"architectures": ["Gemma4Eagle3Model"], "ttt_length": 7}
        config |= {"step_loss_decay": 0.8, "draft_num_hidden_layers": 1}
        config["target_model_name_or_path"] = "google/gemma-4-12B-it"
    else:
        rank = 4 * (kind == "dspark")
        config |= {
            "architectures": ["Gemma4DSparkModel"], "block_size": BLOCK, "mask_token_id": 4,
            "num_anchors": 512, "enable_confidence_head": bool(rank), "markov_rank": rank,
        }  # fmt: skip
        if rank:
            config |= {"markov_head_type": "vanilla", "confidence_head_with_markov": True}
            shapes |= {f"markov_head.markov_w{one}.weight": (vocab, rank) for one in (1, 2)}
            shapes |= {
                "confidence_head.proj.weight": (1, HIDDEN + rank),
                "confidence_head.proj.bias": (1,),
            }
    generator = torch.Generator().manual_seed(3)
    # Norms about 1, matrices so that each layer matters.
    tensors = {
        name: 0.2 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    for name in ("embed_tokens", "lm_head"):  # copies
        weight = model.get_submodule("model." * (name != "lm_head") + name).weight
        tensors[f"{name}.weight"] = weight.detach().clone()
    return config, tensors


# -- the formulas --------------------------------------------------------------------------------


def normed(states: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return states / (states.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(states: Tensor, positions: Tensor) -> Tensor:
    """Rotate ``(tokens, heads, dim)``: of the pairs (i, i + dim / 2) the first share."""
    half, count = DIM // 2, int(TURNED * DIM / 2)
    angles = torch.zeros(len(positions), half)
    angles[:, :count] = positions[:, None] * THETA ** (-2 * torch.arange(count) / DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = states[..., :half], states[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def layer_of(tensors: dict[str, Tensor], layer: int) -> Callable[[str], Tensor]:
    return lambda name: tensors[f"layers.{layer}.{name}"]


def attended(w: Any, own: Tensor, seen: Tensor, at: Tensor, places: Tensor, mask: Any) -> Tensor:
    """Attention of rows ``own`` at positions ``at`` to rows ``seen`` at ``places``."""
    keys = (seen @ w("self_attn.k_proj.weight").T).unflatten(-1, (-1, DIM))
    try:
        values = (seen @ w("self_attn.v_proj.weight").T).unflatten(-1, (-1, DIM))
    except KeyError:
        values = keys
    queries = (own @ w("self_attn.q_proj.weight").T).unflatten(-1, (-1, DIM))
    queries = turned(normed(queries, w("self_attn.q_norm.weight")), at)
    keys, values = turned(normed(keys, w("self_attn.k_norm.weight")), places), normed(values)
    share = HEADS // keys.shape[1]
    keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys).masked_fill(~mask, -torch.inf)
    found = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return found.flatten(1) @ w("self_attn.o_proj.weight").T


def finished(w: Any, residual: Tensor, attention: Tensor) -> Tensor:
    hidden = residual + normed(attention, w("post_attention_layernorm.weight"))
    inner = normed(hidden, w("pre_feedforward_layernorm.weight"))
    gate = functional.gelu(inner @ w("mlp.gate_proj.weight").T, approximate="tanh")
    inner = (gate * (inner @ w("mlp.up_proj.weight").T)) @ w("mlp.down_proj.weight").T
    return (hidden + normed(inner, w("post_feedforward_layernorm.weight"))) * w("layer_scalar")


def block(tensors: dict[str, Tensor], features: Tensor, root: int) -> Tensor:
    """States of a block behind context ``(tokens, features)``."""
    context = normed(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    places = torch.arange(len(context) + BLOCK)
    tokens = torch.tensor([root] + [4] * (BLOCK - 1))
    hidden = tensors["embed_tokens.weight"][tokens] * HIDDEN**0.5
    everything = torch.ones(BLOCK, len(places), dtype=torch.bool)
    for layer in range(2):
        w = layer_of(tensors, layer)
        own = normed(hidden, w("input_layernorm.weight"))
        seen = torch.cat([context, own])
        attention = attended(w, own, seen, places[len(context) :], places, everything)
        hidden = finished(w, hidden, attention)
    return normed(hidden, tensors["norm.weight"])


def after(tensors: dict[str, Tensor], features: Tensor, text: Tensor) -> Tensor:
    """Logits of EAGLE-3 behind each token, given the features of the one before it."""
    w, places = layer_of(tensors, 0), torch.arange(len(text))
    hidden = features @ tensors["fc.weight"].T
    tokens = tensors["embed_tokens.weight"][text] * HIDDEN**0.5
    parts = normed(tokens, w("input_layernorm.weight")), normed(hidden, w("hidden_norm.weight"))
    both, causal = torch.cat(parts, -1), places <= places[:, None]
    hidden = finished(w, hidden, attended(w, both, both, places, places, causal))
    return capped(normed(hidden, tensors["norm.weight"]), tensors)


def capped(states: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    return CAP * torch.tanh(states @ tensors["lm_head.weight"].T / CAP)


# -- against them --------------------------------------------------------------------------------


@pytest.mark.parametrize("equal", [True, False], ids=["keys are values", "values"])
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
@torch.no_grad()
def test_a_block(tmp_path, kind, equal):
    """Its states, logits and Markov head; the output is that of the base."""
    files = released(kind, equal)
    model = imported(tmp_path, "dspark", files, base())
    method, tensors = methods()["dspark"], files[1]
    adapter = find_active(model, "DSPARK")
    assert "lm_head.weight" not in adapter.tensors() and adapter.config.sample_from_anchor
    drafter = method.make_drafter(model, method.parse_options({"tree": "chain"}))
    ids, place = prompt(9), 6
    found = block_sequences(drafter.predictor.network, ids, None, torch.tensor([[place]]))[0, 0]
    features = token_hidden(model, ids, None, (READ[0] + 1, READ[1] + 1))[0, : place + 1]
    expected = block(tensors, features, int(ids[0, place + 1]))
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(
        drafter.predictor.logits(found[None])[0], capped(expected, tensors), **CLOSE
    )
    if kind == "dspark":
        before = torch.tensor([[3, 1, 4, 1, 5]])
        given = drafter.predictor.given(found[None], before)[0]
        w1, w2 = (tensors[f"markov_head.markov_w{one}.weight"] for one in (1, 2))
        markov = capped(expected, tensors) + w1[before[0]] @ w2.T
        torch.testing.assert_close(given, markov, **CLOSE)
    check_same(model, drafting("dspark"), prompt(7, batch=2))


@torch.no_grad()
def test_a_chain(tmp_path):
    """What the first step of EAGLE-3 predicts everywhere; the output is that of the base."""
    files, ids = released("eagle3"), prompt(7)
    model = imported(tmp_path, "eagle3", files, base())
    adapter = find_active(model, "EAGLE3")
    layers = tuple(adapter.config.layers)
    assert layers == (READ[0] + 1, READ[1] + 1)
    states, everywhere = token_hidden(model, ids, None, layers), torch.arange(6)[None]
    found = unrolled(Eagle3Network(model, adapter), ids, states, everywhere, 1)[0, :, 0]
    torch.testing.assert_close(found, after(files[1], states[0, :-1], ids[0, 1:]), **CLOSE)
    check_same(model, drafting("eagle3"), prompt(7, batch=2))
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_they_can_be_trained_further(tmp_path, kind):
    """All parameters get gradients; ``layer_scalar`` is none."""
    model, ids = imported(tmp_path, kind, released(kind), base()), prompt(12)
    model.set_adapter("default")
    adapter = find_active(model, kind.upper())
    adapter.requires_grad_(True)
    batch = TrainingBatch(ids, ids, torch.tensor([[2, 4]]))
    methods()[kind].objective(model, adapter, batch)["loss"].backward()
    for name, parameter in adapter.named_parameters():
        assert "layer_scalar" not in name
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


# -- what is not read ----------------------------------------------------------------------------


BAD: dict[str, tuple[Change, str]] = {
    "moe": (changed(enable_moe_block=True), "enable_moe_block=True: layers of gemma4_text"),
    "inputs": (changed(hidden_size_per_layer_input=8), "hidden_size_per_layer_input=8: layers of"),
    "shared": (changed(num_kv_shared_layers=1), "num_kv_shared_layers=1: layers of gemma4_text"),
    "sliding": (
        changed(layer_types=["sliding_attention", "full_attention"]), "with full attention are read"
    ),
    "rope": (changed(rope_parameters={}), "rope_parameters={}, which must say those of full"),
    "dim": (without("global_head_dim"), "global_head_dim=None"),
    "act": (without("hidden_activation"), "hidden_act=None"),
    "heads": (changed(num_global_key_value_heads=2), "k_proj.weight' has shape"),
    "values": (changed(attention_k_eq_v=False, num_key_value_heads=1), "no tensor 'layers.0.*v_p"),
    "scalar": (without("layers.1.layer_scalar"), "no tensor 'layers.1.layer_scalar'"),
    "norm": (without("layers.0.pre_feedforward_layernorm.weight"), "no tensor 'layers.0.pre_feed"),
    "switch": (changed(new_switch=True), "new_switch=True in config.json: it is"),
    "layout": (changed(dflash_config={"projector_type": "dspark"}), "'gemma4_unified_text': such"),
}  # fmt: skip


OF_LAYERS = ("moe", "inputs", "shared", "sliding", "rope", "dim", "heads", "values")


@pytest.mark.parametrize(
    ("kind", "case"),
    [*(("dspark", case) for case in BAD), *(("eagle3", case) for case in OF_LAYERS)],
)
def test_what_is_not_read(tmp_path, kind, case):
    files, (change, message) = released(kind), BAD[case]
    change(*files)
    check_refused(tmp_path, kind, files, base(), message)


@pytest.mark.parametrize(
    ("kind", "to"), [("dspark", "speculators"), ("eagle3", "speculators"), ("eagle3", "sglang")]
)
def test_other_programs_do_not_know_such_layers(tmp_path, kind, to):
    imported(tmp_path, kind, released(kind), base())
    with pytest.raises(ValueError, match="gemma4_text"):
        export_adapter(tmp_path / "adapter", to, base(), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
