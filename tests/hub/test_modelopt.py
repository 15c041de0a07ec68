"""Drafters that ModelOpt has made and saved: fixtures/drafters/modelopt."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_same
from released import imported, read
from running import drafting, proposals
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_spec.draft.drafter import Drafter

MADE = Path(__file__).parents[1] / "fixtures" / "drafters" / "modelopt"
RECORDED = json.loads((MADE / "drafts.json").read_text())


@cache
def base() -> Any:
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_json_file(MADE / "base.json"))
    model.load_state_dict(load_file(MADE / "base.safetensors"))
    return model.float().eval()


@pytest.mark.parametrize("name", RECORDED["drafts"])
def test_a_call_drafts_what_modelopt_drafts(tmp_path: Path, name: str) -> None:
    """After prompts of several lengths: the base's next token, and a greedy chain."""
    model = imported(tmp_path, name, read(MADE / name), base())
    for length, expected in zip(RECORDED["lengths"], RECORDED["drafts"][name], strict=True):
        prompt = torch.tensor([RECORDED["ids"][:length]])
        with proposals(Drafter) as seen:
            check_same(model, drafting(name, tree="chain", lookup=False), prompt)
        known, tree = seen[0]
        assert known == [*prompt[0].tolist(), expected[0]]
        assert tree.tokens[0, : len(expected)].tolist() == expected
