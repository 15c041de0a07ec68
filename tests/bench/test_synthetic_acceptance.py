"""Acceptance at given rates: how often drafts are accepted, and what is said of the outputs.

Bounds are of five standard deviations with fixed seeds: another random stream fails a comparison in
two million cases.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from replay import RECORDED
from running import drafting
from tiny_checkpoint import make_model, make_tokenizer, save_checkpoint, write_prompts

from hf_spec.core.shapes import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.tools import cli
from hf_spec.tools.bench.contenders import (
    SyntheticRates,
    accept_at,
    add_untrained,
    contenders,
    untrained,
)
from hf_spec.tools.bench.prompts import Prompt
from hf_spec.tools.bench.runner import run

RATES = SyntheticRates((0.9, 0.6, 0.3))
DEVIATIONS = 5
ROWS, NEW = 16, 120
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20}
PENALIZED = {"repetition_penalty": 1.2}
CHAIN = {"tree": "chain"}


def model_with(*strategies: str) -> Any:
    model = make_model()
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    add_untrained(model, untrained(strategies, ()))
    return model


def generated(model: Any, spec: dict[str, Any], new: int = NEW, **settings: Any) -> Any:
    ids = torch.arange(4, 4 + 6 * ROWS).reshape(ROWS, 6)
    torch.manual_seed(0)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **spec,
        **{"do_sample": False, **settings}, return_dict_in_generate=True,
    )  # fmt: skip


def check_rates(stats: Any) -> None:
    for place, offered in stats.offered.items():
        rate = RATES.rates[place - 1] if place <= len(RATES.rates) else 0.0
        bound = DEVIATIONS * math.sqrt(rate * (1 - rate) / offered)
        assert abs(stats.accepted[place] / offered - rate) <= bound, (place, offered)
    assert min(stats.offered[place] for place in (1, 2, 3)) > 500


@pytest.mark.parametrize(
    ("strategy", "options", "settings"),
    [
        ("medusa", CHAIN, {}), ("bita", CHAIN, SAMPLED),
        ("layer_skip", {"skip_mlp": [1], "num_draft_tokens": 4, "draft_exit": "fixed"}, PENALIZED),
    ],
)  # fmt: skip
def test_drafts_are_accepted_at_the_rates(
    strategy: str, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    """In a batch, greedy and sampled, the same ones for a seed; then the model decides again."""
    model, spec = model_with(strategy), drafting(strategy, **options)
    with RATES.of(model):
        found = generated(model, spec, **settings)
        short, again = (generated(model, spec, 16, **settings).sequences for _ in range(2))
    check_rates(found.spec_stats)
    assert torch.equal(short, again)
    if not settings.get("do_sample"):
        plain = generated(model, {}, 16, **settings).sequences
        assert not torch.equal(short, plain)
        assert torch.equal(generated(model, spec, 16, **settings).sequences, plain)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_recorded_steps(settings: dict[str, Any]) -> None:
    """The random numbers are drawn before a record is replayed."""
    model, spec = model_with("medusa"), drafting("medusa", **CHAIN)
    with RATES.of(model):
        stats = generated(model, {**spec, **RECORDED}, **settings).spec_stats
    check_rates(stats)
    code = stats.details["compiled"]
    assert code["runs"] > 20 > code["made"] > 0 and not code["refused"]


def test_first_children_alone() -> None:
    """Under a node only its first child is accepted, whichever tokens there are; a second sibling
    is not, although the target has chosen it."""
    shape = TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])
    tokens = torch.tensor([[7, 20, 21, 22, 23, 24]]).expand(4, -1)
    tree = Tree.of_shapes([shape] * 4).with_tokens(tokens)
    tree = tree.changed(valid=tree.valid & (torch.arange(6) != torch.tensor([0, 0, 0, 1])[:, None]))
    targets = torch.tensor([[21, 23, 24, 90, 91, 92]]).expand(4, -1)
    hits = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1]]).bool()
    result = accept_at(tree, targets, hits)
    emitted = [row[:count] for row, count in zip(result.tokens.tolist(), result.counts.tolist())]
    assert emitted == [[20, 22, 90], [20, 23], [21], [21, 24, 92]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5,0.8", "0.8 after 0.5"), ("1.2", r"must be a number in \[0.0, 1.0\]"),
        ("0.5,-0.1", "-0.1"), ("nan", "nan"), ("0.8;0.6", "must be numbers from 0 to 1"),
        ("", "must be numbers"),
    ],
)  # fmt: skip
def test_wrong_rates(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyntheticRates.parse(text)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("medusa", {"acceptance": "typical"}, "acceptance='typical' with --synthetic-acceptance"),
        ("transformers:prompt_lookup", {}, "accepts by itself"),
    ],
)
def test_what_has_a_rule_of_its_own_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    adapters = untrained([name], ())
    model = make_model()
    add_untrained(model, adapters)
    lineup = contenders([name], {name: options}, adapters)
    with pytest.raises(ValueError, match=message):
        run(model, make_tokenizer(), [Prompt("ab")], lineup, synthetic=RATES)


def test_the_command_says_that_outputs_are_not_the_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a trained adapter; texts do not end before all new tokens."""
    words = [
        "bench", "--model", str(save_checkpoint(tmp_path / "model")), "--dtype", "float32",
        "--prompts", str(write_prompts(tmp_path / "p.jsonl", [{"prompt": "a b"}] * 2)),
        "--strategies", "medusa,prompt_lookup", "--max-new-tokens", "24", "--device", "cpu",
        "--synthetic-acceptance", "1,0.5", "--output", str(tmp_path / "out"),
        "--strategy-kwargs", 'medusa={"drafting": "always"}',
    ]  # fmt: skip
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "synthetic acceptance at rates of 1, 0.5" in text
    assert text.count("not the model's") == 3  # beside the title, in each strategy's row
    assert cli.main([*words, "--json"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["generate"]["synthetic_acceptance"] is None
    assert rows["medusa"]["synthetic_acceptance"] == [1.0, 0.5]
    assert rows["medusa"]["identical"] is None and rows["medusa"]["tau"] > 1.8
    assert all(row["new_tokens"] == 24 * row["prompts"] for row in rows.values())
    settings = json.loads((tmp_path / "out/results.json").read_text())["environment"]["settings"]
    assert settings["synthetic_acceptance"] == [1.0, 0.5]
    assert cli.main([*words[:-4], "--synthetic-acceptance", "2"]) == 2
    assert "--synthetic-acceptance=2.0: must be a number in" in capsys.readouterr().err
