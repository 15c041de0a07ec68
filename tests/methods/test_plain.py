"""``plain``: the tokens of ``generate``, one per step, as it is and by records."""

from typing import Any

import pytest
import torch
from conftest import Tiny, prompt, ragged
from replay import RECORDED, Replay
from running import drafting

import hf_spec
from hf_spec.methods.registry import get_method
from hf_spec.model import captures
from hf_spec.tools.bench.contenders import contenders, parse_names

SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 8, "repetition_penalty": 1.2}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("settings", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("inputs", [{"inputs": prompt()}, ragged()], ids=["one", "three"])
def test_tokens_of_generate(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, inputs: Any, settings: Any, recorded: bool
) -> None:
    monkeypatch.setitem(captures.RECORDERS, "cpu", Replay)
    model, rows = tiny("llama"), len(next(iter(inputs.values())))
    settings = {**settings, "max_new_tokens": 12, "return_dict_in_generate": True}
    # In a sampled batch each row has random numbers of its own, the same ones with any strategy.
    other = drafting("prompt_lookup") if settings["do_sample"] and rows > 1 else {}
    torch.manual_seed(3)
    expected = model.generate(**inputs, **settings, **other)
    for turn in range(2):
        more = RECORDED if recorded else {}
        torch.manual_seed(3)
        output = model.generate(**inputs, **settings, assistant_strategy="plain", **more)
        assert torch.equal(output.sequences, expected.sequences)
        stats = output.spec_stats
        assert stats.mean_accepted_tokens == 1.0 and stats.num_row_steps == 12 * rows
        assert stats.num_drafted_tokens == stats.num_fallback_steps == 0
        if recorded:
            assert stats.details["compiled"]["kept"] and not stats.details["compiled"]["refused"]
            assert turn == 0 or stats.details["compiled"]["made"] == 0


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
