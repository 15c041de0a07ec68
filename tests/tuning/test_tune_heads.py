"""``hf-spec tune`` for drafters without probes: heads on the final hidden state (``medusa``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model
from running import configured, drafting
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from tuned import content, load, make, tune

import hf_spec
from hf_spec import cli
from hf_spec.core.token_tree import TokenTree
from hf_spec.core.tree_states import TreeStates
from hf_spec.hub.folder import check_complete
from hf_spec.hub.push import push
from hf_spec.methods.registry import get_method
from hf_spec.tuning.trees import tune as work
from hf_spec.tuning.trees.bare_trees import BareTrees, counted_paths
from hf_spec.tuning.trees.future_ranks import BEYOND, FutureRanks, measure
from hf_spec.tuning.trees.plots import draw_trees

HEADS, HIDDEN = 3, 32


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The heads are fresh, that is the LM head: they are right where a token is repeated."""
    root, config = tmp_path_factory.mktemp("heads"), hf_spec.MedusaConfig(num_heads=HEADS)
    return make(root, config, "--batch-size", "1,3", "--context", "8,40")


NEW = {"max_new_tokens": 20, "do_sample": False}


def test_the_file(made: Path) -> None:
    (entry,) = content(made)["devices"]
    assert entry["strategy"] == "medusa" and len(entry["landed_accuracies"]) == HEADS
    assert [one["size"] for one in entry["sizes"]] == list(range(2, 13))
    settings = [(one["batch_size"], one["context"]) for one in entry["settings"]]
    assert settings == [(1, 8), (1, 40), (3, 8), (3, 40)]
    for one in entry["settings"]:
        states = TreeStates.from_json(one["states"])
        tree = states.states[-1].tree
        assert states == TreeStates.bare(tree, HEADS) and 1 < len(tree) <= one["size"]
        assert one["visits"] == [0, 0, 0, 1]
        assert one["speedups"][one["size"] - 2] >= 0.989 * max(one["speedups"])
    for one in entry["sizes"]:
        assert one["rows"] == sorted(one["rows"]) and one["rows"][0] == 1


@pytest.mark.parametrize("batch", [1, 3])
def test_tuned_trees_leave_the_output_as_it_is(made: Path, batch: int) -> None:
    ids = torch.tensor(
        [[0, 0, 9, 8, 7, 9, 8, 7], [5, 9, 7, 5, 9, 7, 5, 9], [0, 0, 0, 0, 0, 0, 4, 4]]
    )
    inputs = {"input_ids": ids[-batch:], "attention_mask": (ids[-batch:] != 0).long()}
    plain = load(made, None).generate(**inputs, **NEW)
    config = hf_spec.SpecConfig.from_pretrained(made / "tuned")
    assert config.assistant_kwargs == {"tree": "tuned"}
    model = load(made)
    out = model.generate(**inputs, **configured(config), return_dict_in_generate=True, **NEW)
    assert torch.equal(out.sequences, plain)
    assert out.spec_stats.num_drafted_tokens > 0 and out.spec_stats.mean_accepted_tokens > 1


def test_heads_of_a_strategy_that_prunes(made: Path, tmp_path: Path, capsys: Any) -> None:
    """What wraps the heads does not draft; another strategy's adapter has trees of its own."""
    shutil.copytree(made / "m", tmp_path / "m")
    shutil.copy(made / "p.jsonl", tmp_path)
    base = AutoModelForCausalLM.from_pretrained(made / "m", dtype=torch.float32)
    config = hf_spec.ProPDConfig(num_heads=HEADS)
    get_peft_model(base, config).save_pretrained(tmp_path / "prunes")
    assert tune(tmp_path, "--context", "8", adapter="prunes") == 0
    assert content(tmp_path, "prunes")["devices"][0]["strategy"] == "propd"
    ids = torch.tensor([[5, 9, 7, 5, 9, 7, 5, 9]])
    plain = load(made, None).generate(ids, **NEW)
    config = hf_spec.SpecConfig.from_pretrained(tmp_path / "prunes")
    assert config.assistant_kwargs == {"tree": "tuned"}
    assert torch.equal(load(tmp_path, "prunes").generate(ids, **configured(config), **NEW), plain)
    path = tmp_path / "prunes" / "generation_config.json"
    options = {"drafter": "prompt_lookup"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "assistant_kwargs": options}))
    assert tune(tmp_path, "--context", "8", adapter="prunes") != 0
    assert "propd drafts with another strategy here" in capsys.readouterr().err


def test_batch_size_and_context_choose_the_tree(made: Path, tmp_path: Path) -> None:
    for name in ("m", "tuned"):
        shutil.copytree(made / name, tmp_path / name)
    path = tmp_path / "tuned" / "tree.json"
    data = json.loads(path.read_text())
    for length, one in enumerate(data["devices"][0]["settings"], start=2):
        paths = [[rank] for rank in range(length)]
        one["states"] = TreeStates.bare(TokenTree.from_paths(paths), HEADS).to_json()
    path.write_text(json.dumps(data))
    model = load(tmp_path)
    drafted = {}
    for batch in (1, 3):
        for width in (6, 60):
            ids = torch.randint(4, 260, (batch, width), generator=torch.Generator().manual_seed(0))
            model.generate(
                ids, max_new_tokens=3, do_sample=False, assistant_strategy="medusa",
                assistant_kwargs={"tree": "tuned", "fallback": False},
            )  # fmt: skip
            stats = hf_spec.last_stats(model)
            drafted[batch, width] = stats.num_drafted_tokens
    # One step drafts for sure, and all draft the same trees.
    for length, (key, count) in enumerate(drafted.items(), start=2):
        assert count and count % length == 0, (key, count)


def test_a_tuned_folder_has_a_card_and_can_be_pushed(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_complete(made / "tuned")
    card = (made / "tuned" / "README.md").read_text()
    assert "`tree.json`" in card and "| float32 | 3 | 40 |" in card
    before = card
    assert cli.main(["card", str(made / "tuned")]) == 0
    assert (made / "tuned" / "README.md").read_text() == before
    sent: dict[str, bytes] = {}

    def commit(self: Any, repo_id: str, operations: Any, **kwargs: Any) -> Any:
        files = {one.path_in_repo: Path(one.path_or_fileobj).read_bytes() for one in operations}
        sent.update(files)
        return SimpleNamespace(commit_url="https://hub/commit/1")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: [])
    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", commit)
    push(made / "tuned", "org/heads", base_model="org/base")
    assert json.loads(sent["tree.json"]) == content(made)
    assert b"`tree` | `tuned`" in sent["README.md"]


def test_plots(made: Path, tmp_path: Path) -> None:
    data = content(made)
    (entry,) = data["devices"]
    entry["settings"] = entry["settings"][-1:]  # with a single one the file has no number
    (tmp_path / "tree.json").write_text(json.dumps(data))
    assert cli.main(["plot", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"tree.json", "tune.png", "tree.png"}
    (axes,) = draw_trees(entry, entry["settings"][0]).get_axes()
    assert "probes" not in axes.get_title()  # heads predict without


def test_published_heads_can_be_tuned(made: Path, tmp_path: Path) -> None:
    for name in ("m", "p.jsonl"):
        (tmp_path / name).symlink_to(made / name)
    tensors = {}
    for head in range(HEADS):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN)
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    command = [
        "import", str(tmp_path / "medusa_lm_head.safetensors"), "--type", "medusa",
        "--model", str(made / "m"), "--output", str(tmp_path / "own"),
    ]  # fmt: skip
    assert cli.main(command) == 0
    assert tune(tmp_path, "--limit", "2", adapter="own") == 0
    assert content(tmp_path, "own")["devices"][0]["prompts"] == 2
    ids = torch.tensor([[9, 8, 7, 9, 8, 7, 9, 8]])
    out = load(tmp_path, "own").generate(ids, **NEW, **drafting("medusa", tree="tuned"))
    assert torch.equal(out, load(made, None).generate(ids, **NEW))


# -- what is measured --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranked(made: Path) -> tuple[Any, list[list[int]], FutureRanks]:
    """The model with its adapter, prompts, and the ranks of their answers."""
    model = load(made, "untuned")
    drafter: Any = get_method("medusa").drafter(model, get_method("medusa").parse_options(None))
    prompts = [[5, 9, 7, 5, 9, 7], [40, 41, 42], [11, 90, 100, 7]]
    found = []
    for ids in prompts:
        answer = model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)
        found.append(measure(drafter, ids, answer[0, len(ids) :].tolist()))
    return model, prompts, FutureRanks(tuple(found), per_distance=0)


def test_ranks_are_those_of_the_predictions(ranked: Any) -> None:
    """One place at a time, by the drafter's own chain for stock decoding; from the prompt on."""
    model, prompts, ranks = ranked
    drafter: Any = get_method("medusa").drafter(model, get_method("medusa").parse_options(None))
    answer = model.generate(torch.tensor(prompts[:1]), max_new_tokens=30, do_sample=False)
    ids, start = answer[0].tolist(), len(prompts[0])
    rows = ranks.answers[0]
    assert rows.shape == (31, HEADS) and ranks.tokens == 90
    for place in range(-1, 28):
        chain, _ = drafter.get_candidates(answer[:, : start + place + 1])
        predicted = chain[0, start + place + 2 :].tolist()
        for distance in range(1, HEADS + 1):
            at = start + place + 1 + distance
            rank = rows[place + 1, distance - 1]
            if at >= len(ids):
                assert rank == BEYOND
            else:
                assert (rank == 0) == (predicted[distance - 1] == ids[at])
    assert (rows[-2:] == BEYOND).all()


@pytest.mark.parametrize("size", [2, 3, 7, 16, 40])
def test_replay_takes_the_steps_that_generate_takes(ranked: Any, size: int) -> None:
    """Exactly: the same trees, the same tokens, no chance involved."""
    model, prompts, ranks = ranked
    trees = BareTrees(ranks.accuracies(), size)
    for states in (trees.best(size), trees.static(size), trees.random(size)):
        replay = ranks.replay(states)
        steps = tokens = 0
        for ids in prompts:
            model.generate(
                torch.tensor([ids]), max_new_tokens=30, do_sample=False,
                assistant_strategy="medusa",
                assistant_kwargs={"tree": states.to_json(), "fallback": False},
            )  # fmt: skip
            stats = hf_spec.last_stats(model)
            steps, tokens = steps + stats.num_steps, tokens + stats.num_generated_tokens
        assert (replay.tokens, replay.steps) == (tokens, steps)
        assert replay.visits.tolist() == [0, 0, 0, steps - len(prompts)]
    if size == 40:
        assert replay.steps < tokens  # candidates were accepted


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_answers_tell_little(ranked: Any, length: int) -> None:
    model, prompts, ranks = ranked
    drafter: Any = get_method("medusa").drafter(model, get_method("medusa").parse_options(None))
    answer = model.generate(torch.tensor(prompts[:1]), max_new_tokens=length, do_sample=False)
    rows = measure(drafter, prompts[0], answer[0, len(prompts[0]) :].tolist())
    assert (
        (rows != BEYOND).sum(1) == [min(n, HEADS) for n in range(length - 1, -1, -1)] + [0]
    ).all()


def test_the_trees_that_fare_better_in_replay_are_built(ranked: Any) -> None:
    _, _, ranks = ranked
    sizes, built, replays, accuracies = work.build(ranks, 12)
    assert [one["size"] for one in sizes] == list(built) == list(range(2, 13))
    trees, counted = BareTrees(accuracies, 12), counted_paths(ranks.landed(12).tolist())
    for size in built:
        each = [ranks.replay(one).tau for one in (trees.best(size), trees.of(counted, size))]
        assert replays[size].tau == ranks.replay(built[size]).tau == max(each)


def test_landed_accuracies_begin_behind_the_prompt() -> None:
    """A single answer that is decoded in one step: only the prompt's token says anything."""
    answer = np.array([[0, 0], [-1, -1], [-2, -2], [-2, -2]])
    ranks = FutureRanks((answer,), per_distance=0)
    np.testing.assert_allclose(ranks.landed_accuracies(4)[:, 0], [1, 1])
    replay = ranks.replay(TreeStates.bare(TokenTree.chain(2), 2))
    assert (replay.tokens, replay.steps) == (3, 2)


# -- errors ------------------------------------------------------------------------------------


def test_no_file_beside_the_adapter(made: Path) -> None:
    with pytest.raises(ValueError, match="there is no tree.json where .* Run hf-spec tune"):
        load(made, "untuned").generate(
            torch.tensor([[9, 8, 7]]), **NEW, assistant_strategy="medusa",
            assistant_kwargs={"tree": "tuned"},
        )  # fmt: skip


def test_states_for_more_heads_than_there_are(made: Path) -> None:
    states = TreeStates.bare(TokenTree.chain(4), 4)
    with pytest.raises(ValueError, match="up to 4 predicted tokens, the adapter drafts 3 tokens"):
        load(made).generate(
            torch.tensor([[9, 8, 7]]), **NEW, assistant_strategy="medusa",
            assistant_kwargs={"tree": states.to_json()},
        )  # fmt: skip
    with pytest.raises(ValueError, match="has candidates at depth 4"):
        TreeStates.bare(TokenTree.chain(4), 3)
