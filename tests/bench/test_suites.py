"""``hf-spec bench --suite``: groups, turns, sizes of trees, and what is recorded of them."""

import json
import re
from collections import Counter

import pytest
from tiny_checkpoint import write_prompts

import hf_spec
from hf_spec.tools import cli, data
from hf_spec.tools.bench import prompts as suites
from hf_spec.tools.bench.contenders import contenders, sized
from hf_spec.tools.bench.prompts import read_prompts

ROWS = [
    {"turns": ["abab abab", "again"], "category": "writing", "question_id": 81},
    {"turns": ["cdcd cdcd", "again"], "category": "stem", "question_id": 82},
    {"turns": ["efef efef"], "category": "qa", "question_id": 83},
]


@pytest.fixture
def question(tmp_path):
    return write_prompts(tmp_path / "question.jsonl", ROWS)


def test_categories_of_mt_bench_are_one_group_of_spec_bench(question):
    found = suites.suite_prompts("spec-bench", question)
    assert [(one.category, one.later) for one in found] == [
        ("mt_bench", ("again",)), ("mt_bench", ("again",)), ("qa", ()),
    ]  # fmt: skip
    alone = suites.suite_prompts("mt-bench", question)
    assert [one.category for one in alone] == ["writing", "stem"]
    recorded = suites.protocol("spec-bench", question, found)
    assert recorded["weights"] == {"mt_bench": 0.5, "qa": 0.5}
    assert recorded["missing"] == ["translation", "summarization", "math_reasoning", "rag"]
    assert [one.later for one in read_prompts(question)] == [(), (), ()], "without a suite, one"


def test_a_suite_is_read_by_its_name_on_the_hub(monkeypatch):
    rows = {
        "nvidia/SPEED-Bench/qualitative": [{"turns": ["a", "b"], "category": "coding"}],
        "philschmid/mt-bench": [{"turns": ["a", "b"], "category": "writing"}],
        "openai/openai_humaneval": [{"prompt": "def f():", "entry_point": "f"}],
        "openai/gsm8k/main": [{"question": "1 + 1", "answer": "2"}],
    }
    monkeypatch.setattr(
        data, "_dataset_rows",
        lambda named: (data.Row(named.place, 1, fields) for fields in rows[named.place]),
    )  # fmt: skip
    groups = {}
    for name, suite in suites.SUITES.items():
        if suite.dataset:
            place = suites.place_of(name, None)
            groups[name] = Counter(one.category for one in suites.suite_prompts(name, place))
    assert groups == {
        "speed-bench": {"coding": 1}, "mt-bench": {"writing": 1}, "humaneval": {"humaneval": 1},
        "gsm8k": {"gsm8k": 1},
    }  # fmt: skip


def test_sizes_fix_trees_and_chains_of_every_step():
    names = ["medusa", "prompt_lookup", "token_recycling", "transformers:prompt_lookup"]
    found = sized(names, {"medusa": {"max_depth": 3}}, [8, 60], [4])
    fixed = {"drafting": "always", "lookup": False}
    assert found == {
        "medusa:8": {**fixed, "max_depth": 3, "tree": "adaptive", "num_draft_tokens": 8},
        "medusa:60": {**fixed, "max_depth": 3, "tree": "adaptive", "num_draft_tokens": 60},
        "medusa:chain4": {**fixed, "max_depth": 4, "tree": "chain"},
        "prompt_lookup:8": {"drafting": "always", "num_draft_tokens": 8},
        "prompt_lookup:60": {"drafting": "always", "num_draft_tokens": 60},
        "prompt_lookup:chain4": {"drafting": "always", "num_draft_tokens": 4},
        "token_recycling:8": {**fixed, "tree": "adaptive", "num_draft_tokens": 8},
        "token_recycling:60": {**fixed, "tree": "adaptive", "num_draft_tokens": 60},
        "token_recycling:chain4": {**fixed, "max_depth": 4, "tree": "chain"},
        "transformers:prompt_lookup": {},
    }
    # What is asked for stays.
    joined = sized(["medusa:joined"], {"medusa:joined": {"lookup": True}}, [8], [])
    assert joined["medusa:joined:8"] == {**found["token_recycling:8"], "lookup": True}
    # Every strategy takes its own.
    for name in hf_spec.strategies():
        for label, options in sized([name], {}, [8], [2]).items():
            hf_spec.SpecConfig(assistant_strategy=label.partition(":")[0], assistant_kwargs=options)
    lineup = contenders([*sized(["token_recycling"], {}, [8], [])], found)
    assert lineup[0].kwargs["assistant_kwargs"] == found["token_recycling:8"]


def test_the_command_measures_a_suite(checkpoint, question, tmp_path, capsys):
    command = ["bench", "--model", str(checkpoint), "--dtype", "float32", "--device", "cpu"]
    command += ["--suite", "spec-bench", "--prompts", str(question), "--output", str(tmp_path)]
    command += ["--strategies", "token_recycling", "--max-new-tokens", "8"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "spec-bench: 8 new tokens at most, greedy; prompts: mt_bench 2, qa 1" in printed
    assert "the file has no prompts of translation" in printed
    found = json.loads((tmp_path / "results.json").read_text())
    settings = found["environment"]["settings"]
    protocol = settings["protocol"]
    assert (protocol["suite"], protocol["nodes"], protocol["chain"]) == ("spec-bench", [8, 60], [])
    assert settings["max_new_tokens"] == 8 and settings["seed"] == 0
    rows = {(row["strategy"], row["task"]): row for row in found["runs"]}
    own = [rows["token_recycling:8", task] for task in ("mt_bench", "qa", "all")]
    assert [row["prompts"] for row in own] == [4, 1, 5], "each turn has an answer"
    taus = [row["tau_without_prefill"] for row in own]
    assert taus[2] == pytest.approx((taus[0] + taus[1]) / 2)
    assert ("token_recycling:60", "all") in rows and ("token_recycling", "all") not in rows
    assert (tmp_path / "tau.svg").is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--suite", "spec-bench"], "download https://.*question.jsonl and give it as --prompts"),
        (["--suite", "spec-bnch"], "did you mean 'spec-bench'"),
        (["--suite", "mt-bench", "--prompts", "other"], "none of the categories of --suite mt-"),
        (["--suite", "gsm8k", "--prompts", "other"], "--suite gsm8k; .*no 'question' and no 'answ"),
        (["--suite", "humaneval", "--prompts", "other"], "line 1: has no 'entry_point'"),
        (["--nodes", "0"], "--nodes '0': must be numbers from 1"),
        (["--chain", "three"], "--chain 'three': must be numbers from 1"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_what_cannot_work_is_said_before_a_model_is_loaded(tmp_path, capsys, more, message):
    other = write_prompts(tmp_path / "other", [{"prompt": "a", "category": "poems"}])
    words = [str(other) if word == "other" else word for word in more]
    assert cli.main(["bench", "--model", "org/m", *words]) == 2
    assert re.search(message, capsys.readouterr().err)
