"""Layers for multi-token prediction that are no decoder layer of their model's, by plain formulas
on the tensors as released checkpoints call them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from conftest import check_same, prompt
from random_mtp import random_layers
from released_mtp import add_tensors, checkpoint, released
from running import drafting
from safetensors.torch import load_file
from step_by_hand import chain, commit, started
from test_mtp import CLOSE, model_of
from torch import Tensor
from torch.nn import functional

import hf_spec
from hf_spec.methods.mtp import SINGLE, mtp_layers

pytestmark = pytest.mark.usefixtures("mtp_as_shipped")

#: Known tokens at each step: none, some or all of the drafts before were accepted.
COMMITTED = [7, 8, 11, 12]


def norm(value: Tensor, weight: Tensor, eps: float) -> Tensor:
    return value * (value.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def attention(
    inputs: Tensor, heads: int, dim: int, of: Callable[[str], Tensor],
    rotated: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:  # fmt: skip
    """Causal, of ``(n, hidden)`` inputs, with these weights."""
    queries, keys, values = (
        (inputs @ of(f"{one}_proj").T).unflatten(-1, (-1, dim)) for one in "qkv"
    )
    groups, later = heads // keys.shape[1], torch.ones(len(inputs), len(inputs)).triu(1).bool()
    keys, values = (one.repeat_interleave(groups, 1) for one in (rotated(keys), values))
    scores = torch.einsum("qhd,khd->hqk", rotated(queries), keys) / dim**0.5
    chances = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", chances, values).flatten(1) @ of("o_proj").T


def nemotron(model: Any, of: Callable[[str], Tensor], embeddings: Tensor, rows: Tensor) -> Tensor:
    """Attention without rotations, then experts: two layers of the checkpoint."""
    config, eps = model.config, model.config.layer_norm_epsilon
    joined = [norm(embeddings, of("0.enorm"), eps), norm(rows, of("0.hnorm"), eps)]
    hidden = torch.cat(joined, -1) @ of("0.eh_proj").T
    inputs, heads = norm(hidden, of("0.norm"), eps), config.num_attention_heads
    hidden = hidden + attention(inputs, heads, config.head_dim, lambda x: of(f"0.mixer.{x}"))

    def expert(name: str, row: Tensor) -> Tensor:
        return of(f"1.mixer.{name}.down_proj") @ (of(f"1.mixer.{name}.up_proj") @ row).relu() ** 2

    found = []
    for row in norm(hidden, of("1.norm"), eps):
        scores = (of("1.mixer.gate") @ row).sigmoid()
        bias = of("1.mixer.gate.e_score_correction_bias")
        chosen = (scores + bias).topk(config.num_experts_per_tok).indices.tolist()
        total = sum(float(scores[one]) for one in chosen) / config.routed_scaling_factor
        parts = [scores[one] / total * expert(f"experts.{one}", row) for one in chosen]
        found.append(torch.stack(parts).sum(0) + expert("shared_experts", row))
    return norm(hidden + torch.stack(found), of("1.final_layernorm"), eps)


def ernie(model: Any, of: Callable[[str], Tensor], embeddings: Tensor, rows: Tensor) -> Tensor:
    """In a model of experts a dense layer with interleaved rotations, and the model's own norm."""
    config, eps = model.config, model.config.rms_norm_eps
    joined = [norm(embeddings, of("emb_norm.0"), eps), norm(rows, of("hidden_norm.0"), eps)]
    hidden, heads = torch.cat(joined, -1) @ of("linear_proj.0").T, config.num_attention_heads
    dim = config.hidden_size // heads
    theta = config.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
    turns = torch.polar(torch.ones(()), torch.arange(len(rows))[:, None] * theta)[:, None]

    def rotated(one: Tensor) -> Tensor:
        pairs = torch.view_as_complex(one.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    def block(name: str) -> Tensor:
        return of(f"block.0.{name}")

    inputs = norm(hidden, block("input_layernorm"), eps)
    hidden = hidden + attention(inputs, heads, dim, lambda x: block(f"self_attn.{x}"), rotated)
    inputs = norm(hidden, block("post_attention_layernorm"), eps)
    gate, up = (inputs @ block(f"mlp.{one}_proj").T for one in ("gate", "up"))
    hidden = hidden + (functional.silu(gate) * up) @ block("mlp.down_proj").T
    return norm(hidden, model.model.norm.weight, eps)


#: By type: the formula, and how names of its tensors begin.
FORMULAS = {"nemotron_h": (nemotron, "mtp.layers."), "ernie4_5_moe": (ernie, "model.mtp_")}


def logits_of(name: str, ids: Tensor, drafted: list[int]) -> Tensor:
    """``(1 + drafted, vocab)`` logits of the root and these draft tokens, each below the one before
    it. All rows are computed anew for each.

    Args:
        ids: ``(known,)`` of which the base has states of all but the last.
    """
    model, found = model_of(name), list[Tensor]()
    stored, (formula, start) = load_file(Path(model.name_or_path) / SINGLE), FORMULAS[name]

    def of(name: str) -> Tensor:
        return stored.get(f"{start}{name}.weight", stored.get(f"{start}{name}"))  # type: ignore

    rows, tokens = model.model(ids[None]).last_hidden_state[0, :-1], ids[1:]
    for token in (*drafted, 0):
        made = formula(model, of, model.get_input_embeddings()(tokens), rows)
        found.append(model.lm_head(made[-1]))
        tokens = torch.cat([tokens, torch.tensor([token])])
        rows = torch.cat([rows, made[-1:]])
    return torch.stack(found)


@pytest.mark.parametrize("name", FORMULAS)
@torch.no_grad()
def test_chains_are_those_of_the_formulas(name: str) -> None:
    """Also after drafts of which none, some or all were accepted, in a batch whose second row is a
    step behind the first one."""
    ids = prompt(COMMITTED[-1])
    hidden = model_of(name).model(ids).last_hidden_state
    drafter = started("mtp", model_of(name), 2)
    ends = [0, *(known - 1 for known in COMMITTED)]
    behind = [0, 3, *ends[1:]]
    for step in range(len(COMMITTED)):
        commit(drafter, ids, hidden, [tuple(ends[step:][:2]), tuple(behind[step:][:2])])
        _, found = chain(drafter, 2, 4)
        for row, known in enumerate((ends[step + 1] + 1, behind[step + 1] + 1)):
            drafted = found[row, :-1].argmax(-1).tolist()
            expected = logits_of(name, ids[0, :known], drafted)
            torch.testing.assert_close(found[row], expected, **CLOSE)


def test_two_pairs(tmp_path: Path) -> None:
    """Checkpoints number the parts of all layers on."""
    model: Any = copy.deepcopy(architectures.build("nemotron_h"))
    model.save_pretrained(tmp_path)
    made = random_layers(model, torch.device("cpu"), torch.float32, count=2)
    stored = released("nemotron_h", made.layers[0])
    for name, tensor in released("nemotron_h", made.layers[1]).items():
        start, _, rest = name.removeprefix("mtp.layers.").partition(".")
        stored[f"mtp.layers.{int(start) + 2}.{rest}"] = tensor
    assert {name.split(".")[2] for name in stored} == {*"0123"}
    add_tensors(model, tmp_path, stored)
    for name, tensor in mtp_layers(model).layers.state_dict().items():
        assert torch.equal(tensor, made.layers.state_dict()[name]), name
    check_same(model, drafting("mtp"), prompt(9), max_new_tokens=12, do_sample=False)
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


@torch.no_grad()
def test_half_precision() -> None:
    """The gate of experts stays in float32, as the model's own."""
    model = copy.deepcopy(model_of("nemotron_h")).to(torch.bfloat16)
    for layer in model.model.layers:
        if layer.block_type == "moe":
            layer.mixer.gate.float()
    state = mtp_layers(model).layers.state_dict()
    gates = {name for name in state if "gate" in name}
    assert {name for name, one in state.items() if one.dtype == torch.float32} == gates
    assert len(gates) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_layers_block_type": ["linear_attention", "full_attention"]},
         r"mtp_layers_block_type=\['linear_attention', 'full_attention'\]: layers"),
        ({"mtp_layers_block_type": ["moe"]}, r"mtp_layers_block_type=\['moe'\]: layers"),
        ({"mtp_use_rope": True}, "NemotronHForCausalLM: its config says mtp_use_rope=True: layers"),
        ({"mtp_layers_block_type": ["full_attention", "moe", "mlp"]}, "no tensor '0.mtp_block.2."),
        ({"mtp_layers_block_type": ["moe", "full_attention"]}, "do not fit NemotronHForCausalLM"),
    ],
)  # fmt: skip
def test_other_pairs_are_refused(changes: dict[str, Any], message: str) -> None:
    model = copy.deepcopy(model_of("nemotron_h"))
    vars(model.config).update(changes)
    with pytest.raises(ValueError, match=message):
        model.generate(prompt(5), max_new_tokens=4, assistant_strategy="mtp")


def test_a_narrower_layer_is_refused(tmp_path: Path) -> None:
    """vLLM's `mtp_bottleneck_hidden_size`, with a projection behind the layer."""
    model, _ = checkpoint("nemotron_h", tmp_path)
    add_tensors(model, tmp_path, {"mtp.layers.1.he_proj.weight": torch.zeros(32, 16)})
    with pytest.raises(ValueError, match="unknown tensor 'mtp.layers.1.he_proj.weight'"):
        model.generate(prompt(5), max_new_tokens=4, assistant_strategy="mtp")
