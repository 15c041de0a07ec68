"""Layers for multi-token prediction: what they compute, against what others' code has recorded."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from conftest import check_continued, check_same, prompt, ragged
from covering import covering
from released_mtp import FAMILIES, checkpoint
from running import CAPTURED, drafting
from safetensors.torch import load_file
from step_by_hand import chain, commit, frontier, started
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_spec

pytestmark = pytest.mark.usefixtures("mtp_as_shipped")

FIXTURES = Path(__file__).parents[1] / "fixtures/drafters/mtp"
#: Checkpoints, and what is special about their layers.
LAYERS = {
    "qwen3": "attention", "qwen3_next": "recurrent", "qwen3_5_text": "recurrent",
    "mellum": "attention", "deepseek_v3": "latent attention", "glm4_moe_2": "two for prediction",
}  # fmt: skip
NAMES = [*LAYERS]
#: Types whose layer is no decoder layer of theirs, or not as it is.
BUILT = ["nemotron_h"]
#: Sums in other orders, over some hundred products.
CLOSE = {"rtol": 0.0, "atol": 1e-5}


_MADE = TemporaryDirectory()


@cache
def model_of(name: str) -> Any:
    """That of a fixture, or a random one of a type."""
    if name in FAMILIES and name not in NAMES:
        return checkpoint(name, Path(_MADE.name) / name)[0]
    model: Any = AutoModelForCausalLM.from_pretrained(
        FIXTURES / name / "checkpoint", dtype=torch.float32
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def recorded(name: str) -> tuple[Tensor, Tensor, list[int], dict[str, Tensor]]:
    """The text, the base's final states, the known tokens at each step, and all tensors."""
    found = load_file(FIXTURES / name / "io.safetensors")
    ids = found.get("ids", found.get("input_ids"))
    committed = json.loads((FIXTURES / name / "meta.json").read_text())["committed"]
    return ids, found["base.last_hidden"], committed, found


def chain_of(found: dict[str, Tensor], step: int) -> Tensor:
    return found.get(f"step{step}.chain_logits", found.get(f"step{step}.draft_logits"))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_chains_are_those_recorded(name: str) -> None:
    """Also after drafts of which none, some or all were accepted."""
    ids, hidden, committed, found = recorded(name)
    drafter = started("mtp", model_of(name))
    done = 0
    for step, known in enumerate(committed):
        commit(drafter, ids, hidden, [(done, known - 1)])
        done, expected = known - 1, chain_of(found, step)
        _, drafted = chain(drafter, depth=expected.shape[1])
        torch.testing.assert_close(drafted, expected, **CLOSE)


@pytest.mark.parametrize("name", [*NAMES, *BUILT])
@torch.no_grad()
def test_nodes_of_a_tree_are_as_on_chains(name: str) -> None:
    """Two nodes of each level, of which the second goes on."""
    if name in BUILT:
        ids, known = prompt(7), 6
        hidden = model_of(name).model(ids).last_hidden_state
    else:
        ids, hidden, (known, *_), _ = recorded(name)
    drafter = started("mtp", model_of(name))
    commit(drafter, ids, hidden, [(0, known - 1)])
    depth, zeros = 3, torch.zeros(1, 1, dtype=torch.long)
    logits = drafter.level(frontier(0, zeros))
    path, found = [], []
    for level in range(1, depth):
        tokens = logits[:, -1].topk(2).indices
        parents = torch.full_like(tokens, logits.shape[1] - 1)
        logits = drafter.level(frontier(level, tokens, parents))
        path.append(tokens[0, 1])
        found.append(logits[0, 1])
    drafter.finish()
    for level in range(1, depth):
        tokens = zeros
        for above in range(level + 1):
            logits = drafter.level(frontier(above, tokens))
            tokens = path[above][None, None] if above < level else tokens
        drafter.finish()
        torch.testing.assert_close(logits[0, 0], found[level - 1], **CLOSE)


#: Rows of other lengths, the last one of a token alone.
BATCH = ragged((7, 4, 1))
GIVEN = {"row": {"input_ids": prompt(7)}, "batch": BATCH}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "always": (drafting("mtp"), {}),
    "chain": (drafting("mtp", tree="chain", lookup=True), {}),
    "exactly": (drafting("mtp", num_draft_tokens=5, width=2, max_depth=2), {}),
    "auto": ({"assistant_strategy": "mtp"}, {"max_new_tokens": 24}),
    # Few sizes of trees, each of which is a graph.
    "compiled": ({**drafting("mtp", max_depth=2, width=2), **CAPTURED}, {}),
    "sampled": (drafting("mtp"), {"do_sample": True, "temperature": 1.5, "top_k": 20}),
}


@pytest.mark.parametrize(
    ("name", "setting", "given"),
    covering(
        [(name, setting, given) for name in (*NAMES, *BUILT) for setting in SETTINGS
         for given in GIVEN
         if (setting, given) != ("sampled", "batch")],  # which draws in another order
        lambda name, setting, given: [
            (name, given), (setting, given), setting == "compiled" and LAYERS.get(name, name),
        ],
    ),
)  # fmt: skip
@pytest.mark.usefixtures("sizes_as_shipped")
def test_output_is_that_of_plain_generation(name: str, setting: str, given: str) -> None:
    model, (spec, settings) = model_of(name), SETTINGS[setting]
    check_same(model, spec, **GIVEN[given], **{"max_new_tokens": 8, **settings})
    if setting != "auto":
        assert hf_spec.last_stats(model).num_drafted_tokens > 0


@pytest.mark.parametrize("name", ["qwen3_next", "glm4_moe_2", *BUILT])
def test_continued_cache(name: str) -> None:
    """The drafter has not seen what an earlier call has cached."""
    model = model_of(name)
    check_continued(model, drafting("mtp"), **BATCH, max_new_tokens=8)
    assert hf_spec.last_stats(model).num_drafted_tokens > 0
