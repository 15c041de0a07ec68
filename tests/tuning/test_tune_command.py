"""``hf-spec tune`` and ``hf-spec plot``, what it measures, and decoding with its trees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from running import configured, drafting
from transformers import AutoTokenizer
from tuned import content, load, make, tune

import hf_spec
from hf_spec import cli
from hf_spec.bench.prompts import Prompt
from hf_spec.core.tree_states import TreeStates
from hf_spec.decoding import prefill
from hf_spec.hub.folder import check_complete
from hf_spec.methods.registry import get_method
from hf_spec.policy import tuned_trees
from hf_spec.policy.tuned_trees import Device
from hf_spec.tuning.trees import future_ranks
from hf_spec.tuning.trees import tune as work
from hf_spec.tuning.trees.future_ranks import BEYOND, FutureRanks, measure
from hf_spec.tuning.trees.sparse_tree import SparseTrees
from hf_spec.tuning.trees.step_times import PLAIN, START, StepTimer, StepTimes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = hf_spec.BitaConfig(num_mask_tokens=2, num_prompt_tokens=2)
    return make(tmp_path_factory.mktemp("tune"), config, "--batch-size", "1,2", "--context", "8,40")


IDS = torch.tensor([[9, 8, 7, 9, 8, 7, 9, 8]])
NEW = {"max_new_tokens": 20, "do_sample": False}


# -- the command -------------------------------------------------------------------------------


def test_the_file(made: Path) -> None:
    data = content(made)
    assert data["version"] == 1 and len(data["weights"]) == 64
    (entry,) = data["devices"]
    assert Device(entry["device"], entry["kind"], entry["dtype"], entry["threads"]) == Device.of(
        load(made)
    )
    assert entry["environment"]["torch"] == torch.__version__ and entry["prompts"] == 3
    table = np.array(entry["landed_accuracies"])
    assert table.shape[0] == 2 and table.min() >= 0 and table.sum(1).max() <= 1 + 1e-4
    assert [one["size"] for one in entry["sizes"]] == list(range(2, 13))
    settings = [(one["batch_size"], one["context"]) for one in entry["settings"]]
    assert settings == [(1, 8), (1, 40), (2, 8), (2, 40)]
    for one in entry["settings"]:
        states = TreeStates.from_json(one["states"])
        assert states.max_probes == 2
        assert max(state.num_rows() for state in states.states) <= one["size"]
        best = max(one["speedups"])
        place = one["size"] - 2
        assert one["speedups"][place] >= 0.989 * best  # figures are rounded
        assert one["speedup"] == one["speedups"][place]
        seconds = [one["plain_seconds"], *one["seconds"].values()]
        assert seconds == sorted(seconds)


def test_the_folder_uses_them_in_every_way(made: Path, tmp_path: Path) -> None:
    plain = load(made, None).generate(IDS, **NEW)
    config = hf_spec.SpecConfig.from_pretrained(made / "tuned")
    assert config.assistant_kwargs == {"tree": "tuned"}
    check_complete(made / "tuned")
    card = (made / "tuned" / "README.md").read_text()
    assert "`tree.json`" in card and "| float32 | 1 | 40 |" in card
    base = load(made, None)
    for model in (load(made), PeftModel.from_pretrained(base, made / "tuned")):
        out = model.generate(
            input_ids=IDS, **configured(config), return_dict_in_generate=True, **NEW
        )
        assert torch.equal(out.sequences, plain)
        assert out.spec_stats.num_drafted_tokens > 0
    drafter = get_method("bita").drafter(
        load(made), get_method("bita").parse_options({"tree": "tuned"})
    )
    assert drafter.distances == 2 and len(drafter.source.trees.entries) == 1


def test_options_of_static_trees_give_way(made: Path, tmp_path: Path) -> None:
    """What the folder said of the tree's shape would contradict the tuned one."""
    for name in ("m", "tuned"):
        shutil.copytree(made / name, tmp_path / name)
    shutil.copy(made / "p.jsonl", tmp_path / "p.jsonl")
    stored = {"tree": "efficient", "top_k": 2, "max_depth": 1, "retrieval": True}
    hf_spec.SpecConfig("bita", stored).save_pretrained(tmp_path / "tuned")
    assert tune(tmp_path, "--limit", "1") == 0
    config = hf_spec.SpecConfig.from_pretrained(tmp_path / "tuned")
    assert config.assistant_kwargs == {"tree": "tuned", "retrieval": True}
    for tree in ("tuned", "chain", [[0]]):
        with pytest.raises(ValueError, match="top_k=2 is of the trees 'efficient' and 'full'"):
            hf_spec.SpecConfig("bita", {"tree": tree, "top_k": 2})


def test_without_the_option_trees_stay_static(made: Path) -> None:
    model = load(made)
    options = get_method("bita").parse_options(None)
    assert not hasattr(get_method("bita").drafter(model, options).source, "trees")


def test_the_same_device_replaces_its_entry_and_others_stay(made: Path, tmp_path: Path) -> None:
    for name in ("m", "tuned"):
        shutil.copytree(made / name, tmp_path / name)
    shutil.copy(made / "p.jsonl", tmp_path / "p.jsonl")
    path = tmp_path / "tuned" / "tree.json"
    data = json.loads(path.read_text())
    other = {**data["devices"][0], "device": "Some GPU", "kind": "cuda", "threads": None}
    path.write_text(json.dumps({**data, "devices": [data["devices"][0], other]}))
    assert tune(tmp_path, "--limit", "2") == 0
    devices = json.loads(path.read_text())["devices"]
    assert [one["device"] for one in devices] == ["Some GPU", data["devices"][0]["device"]]
    assert devices[1]["prompts"] == 2
    # Other weights make all that was measured worthless.
    assert work.with_entry(data, other, "0" * 64)["devices"] == [other]


def test_a_card_that_was_edited_stays(made: Path, tmp_path: Path) -> None:
    for name in ("m", "tuned"):
        shutil.copytree(made / name, tmp_path / name)
    shutil.copy(made / "p.jsonl", tmp_path / "p.jsonl")
    (tmp_path / "tuned" / "README.md").write_text("my own\n")
    assert tune(tmp_path, "--limit", "1") == 0
    assert (tmp_path / "tuned" / "README.md").read_text() == "my own\n"


def test_plots(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plot", str(made / "tuned"), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    settings = len(content(made)["devices"][0]["settings"])
    names = {"tune.png", *(f"tree-{n}.png" for n in range(1, settings + 1))}
    assert {path.name for path in tmp_path.iterdir()} == names and settings > 1
    assert all(str(tmp_path / name) in out for name in names)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dtype", "int3"], "--dtype 'int3'"),
        (["--batch-size", "0"], "--batch-size '0'"),
        (["--context", "many"], "--context 'many'"),
        (
            ["--context", "500"],
            "a context of 500 tokens, with a tree behind it, does not fit",
        ),
        (["--adapter", "/nowhere"], "there is no folder with adapter_model.safetensors"),
        (["--prompts", "/nowhere"], "cannot read '/nowhere': No such file"),
        (["--max-size", "1"], "--max-size"),
    ],
)
def test_bad_input_ends_in_one_line(
    made: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    before = content(made)
    assert tune(made, *more) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("hf-spec: ")
    assert content(made) == before


def test_strategies_without_trees_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "untuned", tmp_path / "lookup")
    hf_spec.SpecConfig(assistant_strategy="prompt_lookup").save_pretrained(tmp_path / "lookup")
    assert tune(made, "--adapter", str(tmp_path / "lookup")) == 2
    assert "'prompt_lookup', which has no trees to tune; those of bita" in capsys.readouterr().err
    assert cli.main(["plot", str(made / "untuned")]) == 2
    assert "tree.json of hf-spec tune" in capsys.readouterr().err


# -- what is measured --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranked(made: Path) -> tuple[Any, list[list[int]], FutureRanks]:
    """The model with its adapter, prompts, and the ranks of their answers."""
    model = load(made, "untuned")
    drafter: Any = get_method("bita").drafter(model, get_method("bita").parse_options(None))
    prompts = [[5, 9, 7, 5, 9, 7], [40, 41, 42], [11, 90, 100, 7]]
    found = []
    for ids in prompts:
        answer = model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)
        found.append(measure(drafter, ids, answer[0, len(ids) :].tolist()))
    return model, prompts, FutureRanks(tuple(found))


def test_ranks_are_those_of_the_predictions(ranked: Any, made: Path) -> None:
    """One place at a time, by the drafter's own chain for stock decoding."""
    model, prompts, ranks = ranked
    drafter: Any = get_method("bita").drafter(model, get_method("bita").parse_options(None))
    answer = model.generate(torch.tensor(prompts[:1]), max_new_tokens=30, do_sample=False)
    ids, start = answer[0].tolist(), len(prompts[0])
    rows = ranks.answers[0]
    assert rows.shape == (31, 2) and ranks.tokens == 90
    for place in range(-1, 28):
        chain, _ = drafter.get_candidates(answer[:, : start + place + 1])
        predicted = chain[0, start + place + 2 :].tolist()
        for distance in (1, 2):
            at = start + place + 1 + distance
            if at >= len(ids):
                assert rows[place + 1, distance - 1] == BEYOND
            else:
                right = predicted[distance - 1] == ids[at]
                assert (rows[place + 1, distance - 1] == 0) == right
    assert (rows[-2:] == BEYOND).all()


@pytest.mark.parametrize("size", [2, 3, 7, 16, 40])
def test_replay_takes_the_steps_that_generate_takes(ranked: Any, size: int) -> None:
    """Exactly: the same trees, the same tokens, no chance involved."""
    model, prompts, ranks = ranked
    trees = SparseTrees(ranks.accuracies(), size)
    for states in (trees.best(size), trees.static(size), trees.random(size)):
        replay = ranks.replay(states)
        steps = tokens = 0
        for ids in prompts:
            model.generate(
                torch.tensor([ids]), max_new_tokens=30, do_sample=False,
                **drafting("bita", tree=states.to_json()),
            )  # fmt: skip
            stats = hf_spec.last_stats(model)
            steps, tokens = steps + stats.num_steps, tokens + stats.num_generated_tokens
        assert (replay.tokens, replay.steps) == (tokens, steps)
        assert replay.visits.sum() == steps - len(prompts)
    if size == 40:
        assert replay.steps < tokens  # candidates were accepted


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_answers_tell_little(ranked: Any, length: int) -> None:
    model, prompts, _ = ranked
    drafter: Any = get_method("bita").drafter(model, get_method("bita").parse_options(None))
    answer = model.generate(torch.tensor(prompts[:1]), max_new_tokens=length, do_sample=False)
    rows = measure(drafter, prompts[0], answer[0, len(prompts[0]) :].tolist())
    assert rows.shape == (length + 1, 2)
    assert (rows != BEYOND).sum(1).tolist() == [min(n, 2) for n in range(length - 1, -1, -1)] + [0]


def test_prompts_too_long_for_probes(ranked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step behind them is a plain one."""
    model, prompts, short = ranked
    monkeypatch.setattr(future_ranks, "RIDING", 3)
    monkeypatch.setattr(prefill, "RIDING", 3)
    drafter: Any = get_method("bita").drafter(model, get_method("bita").parse_options(None))
    answer = model.generate(torch.tensor(prompts[:1]), max_new_tokens=30, do_sample=False)
    rows = measure(drafter, prompts[0], answer[0, len(prompts[0]) :].tolist())
    assert (rows[0] == BEYOND).all() and (rows[1:] == short.answers[0][1:]).all()
    ranks = FutureRanks((rows,))
    states = SparseTrees(short.accuracies(), 7).best(7)
    replay = ranks.replay(states)
    model.generate(
        torch.tensor(prompts[:1]), max_new_tokens=30, do_sample=False,
        **drafting("bita", tree=states.to_json()),
    )  # fmt: skip
    assert hf_spec.last_stats(model).num_steps == replay.steps


def test_accuracies_count_places() -> None:
    answers = (np.array([[0, 1], [2, 0], [-1, 0], [0, -2], [-2, -2], [-2, -2]]),)
    ranks = FutureRanks(answers)
    assert ranks.tokens == 5 and len(ranks.places) == 3
    np.testing.assert_allclose(ranks.accuracies()[:, :3], [[1 / 3, 0, 1 / 3], [2 / 3, 1 / 3, 0]])


def test_landed_accuracies_are_conditional() -> None:
    """With one row for a candidate every step begins behind the one before: all places but one."""
    answer = np.array([[0, 0], [-1, 0], [0, 0], [-1, 1], [-1, -1], [0, 0], [-2, -2], [-2, -2]])
    table = FutureRanks((answer,)).landed_accuracies(2)
    # Of the places where nearer tokens were among the likeliest only, hence no 1 at distance 2.
    assert table[1, 1] == 0 and table[1, 0] == 1
    assert 0 < table[0, 0] < 1


def test_the_smallest_of_equally_good_sizes() -> None:
    assert work.choose({4: 1.1, 8: 1.495, 16: 1.5, 32: 1.2}) == 8


def test_mean_seconds_of_batches() -> None:
    """Rows of a batch are in states of their own: the largest tree decides."""
    times = StepTimes(1.0, 2.5, {3: 3.0, 10: 10.0})
    trees = SparseTrees([[0.5, 0.2], [0.4, 0.1]], 10)
    states = trees.best(10)
    small, large = states.states[0], states.states[2]
    assert times.seconds(small) == 2.5 and times.seconds(large) == large.num_rows()
    visits = np.array([3.0, 0.0, 1.0])
    replay: Any = type("Replay", (), {"visits": visits})
    one = work.mean_seconds(times, states, replay, 1)
    assert one == pytest.approx(0.75 * times.seconds(small) + 0.25 * times.seconds(large))
    two = work.mean_seconds(times, states, replay, 2)
    share = 0.75**2  # both rows in the small one
    assert two == pytest.approx(share * times.seconds(small) + (1 - share) * times.seconds(large))


def test_ensembles_of_prompt_tokens_count_as_the_rows_they_are(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPD with three EPTs: sizes, timed steps and stored times are in rows of the forward."""
    model, method = load(made, None), get_method("ppd")
    torch.manual_seed(0)
    model.add_adapter(hf_spec.PPDConfig(num_prompt_tokens=2, num_ept=3))
    tokenizer = AutoTokenizer.from_pretrained(made / "m")
    prompts = [Prompt("abab" * 4), Prompt("xyz xyz xyz"), Prompt("one one one")]
    with pytest.raises(ValueError, match="max_size=3: a step .* has 4 step tokens"):
        work.TreeTuner(model, tokenizer, prompts, method, {}, work.Settings(24, 3))
    tuner = work.TreeTuner(model, tokenizer, prompts, method, {}, work.Settings(24, 16))
    answer = np.array([[0, 0], [-1, 0], [0, 0], [0, 1], [1, 0], [0, 0], [-2, -2], [-2, -2]])
    ranks = FutureRanks((answer,) * 3, tuner.drafter.per_distance)
    monkeypatch.setattr(tuner, "measure", lambda done: ranks)
    tuner.answers = [[5, 6, 7]] * 3
    made_draft, shapes = StepTimer._draft, {}

    def noted(self: Any, forward: Any, shape: Any) -> Any:
        draft = made_draft(self, forward, shape)
        name = next(rows for rows, one in self.shapes.items() if one is shape)
        shapes[name] = draft.tokens.shape[1]
        shapes[name] += 0 if draft.probes is None else draft.probes.num_probes
        return draft

    monkeypatch.setattr(StepTimer, "_draft", noted)
    entry = work.tune(tuner, {})
    for rows, forwarded in shapes.items():
        assert forwarded == {PLAIN: 1, START: 1 + 2 * 3}.get(rows, rows)
    (setting,) = entry["settings"]
    assert {*map(int, setting["seconds"])} == {*shapes} - {PLAIN, START}
    for one in entry["sizes"]:
        assert max(one["rows"]) <= one["size"]
    states = TreeStates.from_json(setting["states"])
    assert max(state.num_rows(3) for state in states.states) <= setting["size"]


# -- decoding with what the file holds ---------------------------------------------------------


def entry(name: str, kind: str, dtype: str, threads: int | None, *settings: Any) -> dict[str, Any]:
    states = TreeStates.from_json([{"paths": [], "probes": [0]}])
    rows = [
        {"batch_size": b, "context": c, "states": (made or states).to_json()}
        for b, c, made in settings
    ]
    return {"device": name, "kind": kind, "dtype": dtype, "threads": threads, "settings": rows}


def marked(number: int) -> TreeStates:
    """Trees that can be told from others."""
    return TreeStates.from_json([{"paths": [], "probes": [0]}] * number)


def test_the_nearest_trees_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    data = {
        "version": 1,
        "devices": [
            entry("CPU A", "cpu", "bfloat16", 2, (1, 100, marked(1)), (1, 4000, marked(2)),
                  (8, 100, marked(3))),
            entry("CPU A", "cpu", "bfloat16", 16, (1, 100, marked(4))),
            entry("CPU A", "cpu", "float32", 2, (1, 100, marked(5))),
            entry("GPU B", "cuda", "bfloat16", None, (1, 100, marked(6))),
        ],
    }  # fmt: skip
    trees = tuned_trees.TunedTrees.from_json(data)
    tuned_trees._warn_of_other_device.cache_clear()

    def took(device: Device, batch: int = 1, context: int = 100) -> int:
        return len(trees.select(device, batch, context).states)

    a = Device("CPU A", "cpu", "bfloat16", 2)
    assert (took(a), took(a, context=2000), took(a, batch=5)) == (1, 2, 3)
    assert took(Device("CPU A", "cpu", "bfloat16", 12)) == 4
    assert took(Device("CPU A", "cpu", "float32", 16)) == 5
    assert took(Device("GPU B", "cuda", "bfloat16")) == 6
    assert not caplog.records
    for _ in range(2):  # said once
        assert took(Device("GPU C", "cuda", "float16")) == 6
    assert took(Device("CPU D", "cpu", "float32", 2)) == 5
    assert [r.message.partition(" has no entry")[0] for r in caplog.records] == ["tree.json"] * 2
    assert "GPU C, float16" in caplog.records[0].message and "GPU B" in caplog.records[0].message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "expected"),
        ({"version": 2, "devices": []}, "version 2: this hf_spec reads version 1"),
        ({"version": 1, "devices": []}, "holds no trees"),
        ({"version": 1, "devices": [{"device": "x"}]}, r"devices\[0\] has no usable 'kind'"),
        ({"version": 1, "devices": [entry("x", "cpu", "f", 1)]}, r"\[0\].settings holds no trees"),
        ({"version": 1, "devices": [7]}, r"devices\[0\] has no usable 'device'"),
    ],
)
def test_wrong_files(data: Any, message: str, tmp_path: Path) -> None:
    refused(tmp_path, json.dumps(data), message)


def refused(folder: Path, text: str, message: str) -> None:
    path = folder / "tree.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        tuned_trees.read_trees(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


DEVICE, SETTING = r"devices\[0\]", r"devices\[0\].settings\[0\]"
MANY = 20_000


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("batch_size", 0, rf"{SETTING}.batch_size=0: must be a whole number from 1 to"),
        ("batch_size", 1.5, rf"{SETTING}.batch_size=1.5: must be a whole number"),
        ("context", -5, rf"{SETTING}.context=-5: must be a whole number from 0 to"),
        ("context", 10**400, rf"{SETTING}.context=10+: must be a whole number from 0 to"),
        ("seconds", {"4": -0.1}, rf"{SETTING}.seconds\[4\]=-0.1: must be a number in \(0.0, 1"),
        ("seconds", {"4": float("inf")}, rf"{SETTING}.seconds\[4\]=inf: must be a number"),
        ("seconds", {"4": "fast"}, rf"{SETTING}.seconds\[4\]='fast': must be a number"),
        ("seconds", {"few": 0.1}, rf"{SETTING}.seconds: must be an object of seconds by numbers"),
        ("seconds", [0.1], rf"{SETTING}.seconds: must be an object of seconds by numbers of rows"),
        ("states", [], rf"{SETTING}.states: 0 states: .* and at most 256 more"),
        ("states", 7, rf"{SETTING}.states: a dynamic tree is a list of states"),
        (
            "states", [{"paths": [[n] for n in range(MANY)], "probes": [0] * (MANY + 1)}] * 2,
            rf"{SETTING}.states: a tree with more than 1024 candidates",
        ),
        (
            "states", [{"paths": [], "probes": [0]}] * MANY,
            rf"{SETTING}.states: {MANY} states: .* and at most 256 more",
        ),
        (
            "states", [{"paths": [], "probes": [MANY]}] * 2,
            rf"{SETTING}.states: 1 nodes with {MANY} probes: a step has at most 4096 of both",
        ),
        ("threads", "x", rf"{DEVICE}.threads='x': must be a whole number from 1 to"),
        ("kind", 7, rf"{DEVICE}: device, kind and dtype must be words"),
        ("accuracies", [], rf"{DEVICE}.accuracies: must be a list for 1 to 256 distances"),
        ("accuracies", [[]], rf"{DEVICE}.accuracies\[0\]: must be a list of probabilities"),
        ("accuracies", [[0.5], [0.2, 0.1]], rf"{DEVICE}.accuracies\[1\]: .* equally many for"),
        ("accuracies", [[0.5, 2]], rf"{DEVICE}.accuracies\[0\]\[1\]=2: must be a number in \[0.0"),
        ("accuracies", [[float("nan")]], rf"{DEVICE}.accuracies\[0\]\[0\]=nan: must be a number"),
        ("landed_accuracies", [["x"]], rf"{DEVICE}.landed_accuracies\[0\]\[0\]='x': must be"),
    ],
)  # fmt: skip
def test_wrong_fields(place: str, value: Any, message: str, tmp_path: Path) -> None:
    """One line that names the file, the field and the rule."""
    item = entry("x", "cpu", "f", 1, (1, 10, None))
    tuned_trees.TunedTrees.from_json({"version": 1, "devices": [item]})
    (item["settings"][0] if message.startswith(SETTING) else item)[place] = value
    refused(tmp_path, json.dumps({"version": 1, "devices": [item]}), message)


def test_files_that_are_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tmp_path, "[" * 100_000, "is no file of tuned trees: maximum recursion depth")
    monkeypatch.setattr(tuned_trees, "MAX_JSON", 100)
    refused(tmp_path, " " * 101, "it has 101 bytes, at most 100 are read")


def test_a_rank_beyond_the_vocabulary(made: Path, tmp_path: Path) -> None:
    model = load(made)
    vocab = model.config.vocab_size
    states = [{"paths": [], "probes": [1]}, {"paths": [[vocab]], "probes": [1, 1]}]
    message = f"has a candidate of rank {vocab}: .* the model has {vocab} tokens"
    for tree in (states, [[0], [vocab]]):
        with pytest.raises(ValueError, match=f"^tree {message}"):
            model.generate(IDS, **NEW, assistant_strategy="bita", assistant_kwargs={"tree": tree})
    shutil.copytree(made / "tuned", tmp_path / "tuned")
    data = {"version": 1, "devices": [entry("x", "cpu", "f", 1, (1, 10, None))]}
    data["devices"][0]["settings"][0]["states"] = states
    (tmp_path / "tuned" / "tree.json").write_text(json.dumps(data))
    model = load(made, None)
    model.load_adapter(tmp_path / "tuned")
    with pytest.raises(ValueError, match=f"^tree.json {message}"):
        model.generate(IDS, **NEW, assistant_strategy="bita", assistant_kwargs={"tree": "tuned"})


def test_no_file_beside_the_adapter(made: Path, fresh: Callable[..., Any]) -> None:
    in_memory = fresh()
    in_memory.add_adapter(hf_spec.BitaConfig())
    for model in (load(made, "untuned"), in_memory):
        with pytest.raises(ValueError, match="there is no tree.json where .* Run hf-spec tune"):
            model.generate(
                IDS, **NEW, assistant_strategy="bita", assistant_kwargs={"tree": "tuned"}
            )


def test_a_file_for_more_mask_tokens_than_there_are(made: Path, tmp_path: Path) -> None:
    model = load(made)
    states = SparseTrees([[0.3] * 3] * 3, 20).best(20)
    with pytest.raises(ValueError, match="up to 3 predicted tokens, the adapter drafts 2 tokens"):
        model.generate(
            IDS, **NEW, assistant_strategy="bita", assistant_kwargs={"tree": states.to_json()}
        )
    with pytest.raises(ValueError, match="max_depth=1 with a dynamic tree"):
        hf_spec.SpecConfig("bita", {"tree": "tuned", "max_depth": 1})


def test_dynamic_trees_as_an_option(made: Path) -> None:
    model, plain = load(made), load(made, None).generate(IDS, **NEW)
    states = SparseTrees([[0.1] * 9, [0.1] * 9], 20).best(20)
    kwargs = drafting("bita", tree=states.to_json(), retrieval=True)
    assert torch.equal(model.generate(IDS, **NEW, **kwargs), plain)
    with pytest.raises(ValueError, match="a dynamic tree is a list of states"):
        hf_spec.SpecConfig("bita", {"tree": [{"paths": []}]})


def test_a_folder_that_names_trees_must_have_them(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "tuned", tmp_path / "tuned")
    (tmp_path / "tuned" / "tree.json").unlink()
    with pytest.raises(ValueError, match="names tuned trees, and there is no tree.json"):
        check_complete(tmp_path / "tuned")
