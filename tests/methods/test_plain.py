"""``plain``: the tokens of ``generate``, one per step, as it is and by records."""

import pytest
import torch
from conftest import Tiny, prompt

import hf_spec
from hf_spec.methods.registry import get_method
from hf_spec.tools.bench.contenders import contenders, parse_names


def test_it_takes_no_options_of_drafting(tiny: Tiny) -> None:
    for name in ("tree", "num_draft_tokens", "max_depth", "lookup", "lookup_history", "acceptance"):
        with pytest.raises(ValueError, match=f"'plain' has no option '{name}'"):
            hf_spec.SpecConfig("plain", {name: 1})
    drafter = get_method("plain").make_drafter(tiny(), get_method("plain").parse_options({}))
    assert torch.equal(drafter.get_candidates(prompt())[0], prompt())


def test_it_is_another_contender_than_generate() -> None:
    names = parse_names("plain,generate,prompt_lookup")
    assert [one.name for one in contenders(names)] == ["plain", "prompt_lookup"]
    assert "plain" in hf_spec.strategies() and "generate" not in hf_spec.strategies()
