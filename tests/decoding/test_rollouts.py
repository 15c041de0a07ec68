"""Rollouts drafted by the answers of earlier ones: the same distribution, fewer steps."""

import copy
import gc
import pickle
import sqlite3
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tiny, prompt, ragged
from replay import RECORDED
from running import one_of_each_kind
from scipy import stats
from test_compiled import adapt, generate, strategy

import hf_spec
from hf_spec.drafting import rollouts

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 12, "max_new_tokens": 24}


def change(model: Any, size: float) -> None:
    """As a step of training does."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for x in model.parameters():
            x += size * x.std().nan_to_num() * torch.randn(x.shape, generator=generator)


def rollout(model: Any, history: Any, inputs: Any, name: str = "plain", **settings: Any) -> Any:
    spec = strategy(name, history=history)
    if name == "plain":
        del spec["assistant_kwargs"]["drafting"]
    return generate(model, inputs, **{**SAMPLED, **spec, **settings})


def seeds_alone(history: Any, path: Path) -> Any:
    """A history that makes the same random numbers and drafts nothing."""
    history.save(path)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("update answers set tokens = x''")
    other = hf_spec.RolloutHistory()
    other.load(path)
    return other


def lengths(history: Any, path: Path) -> list[int]:
    """Those of its answers, which are saved."""
    history.save(path)
    with closing(sqlite3.connect(path)) as file:
        return [n // 4 for (n,) in file.execute("select length(tokens) from answers order by id")]


def kept(output: Any) -> int:
    return sum(output.spec_stats.accepted.values())


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("name", "given"), [*((name, {}) for name in one_of_each_kind()), ("plain", RECORDED)]
)
def test_only_the_number_of_steps_depends_on_it(
    fresh: Tiny, name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rollouts, "SHARE", 0.0)  # rows with and without old tokens
    history, model = hf_spec.RolloutHistory(), adapt(fresh("llama"), name)
    model.requires_grad_(True)
    call = partial(rollout, model, inputs=ragged(), name=name, **given)
    call(history)
    change(model, 0.005)
    alone, ours = call(seeds_alone(history, tmp_path / "answers")), call(history)
    assert torch.equal(ours.sequences, alone.sequences)
    assert kept(ours) > kept(alone)


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_answers_are_those_of_plain_generate(fresh: Tiny, batch: int) -> None:
    history, model = hf_spec.RolloutHistory(), fresh("llama")
    greedy = {"do_sample": False, "temperature": None, "top_k": None}
    for _ in range(3):
        change(model, 0.02)
        plain = generate(model, prompt(12, batch), max_new_tokens=24)
        ours = rollout(model, history, prompt(12, batch), **greedy)
        assert torch.equal(ours.sequences, plain.sequences)
    assert kept(ours) > 0


def test_the_distribution_is_that_of_the_new_policy(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chi-square test of the first two tokens; it fails by chance once in 10,000 times, and
    rejects the old policy's."""
    monkeypatch.setattr(rollouts, "SHARE", 0.0)
    model, rows = fresh("llama"), 2000
    settings = {"temperature": 1.5, "top_k": 4, "max_new_tokens": 3}

    def distribution(tokens: list[int]) -> dict[int, float]:
        ids = torch.cat([prompt(12), torch.tensor([tokens], dtype=torch.long)], 1)
        with torch.no_grad():
            top = (model(ids).logits[0, -1] / 1.5).topk(4)
        return dict(zip(top.indices.tolist(), top.values.softmax(-1).tolist()))

    def expected() -> dict[tuple[int, int], float]:
        first = distribution([])
        return {(a, b): p * q for a, p in first.items() for b, q in distribution([a]).items()}

    def p_value(sequences: torch.Tensor, cells: dict[tuple[int, int], float]) -> float:
        seen = Counter(map(tuple, sequences[:, 12:14].tolist()))
        if not seen.keys() <= cells.keys():
            return 0.0
        observed = [seen[cell] for cell in cells]
        total = sum(cells.values())  # 1 up to rounding
        return float(stats.chisquare(observed, [rows * p / total for p in cells.values()]).pvalue)

    torch.manual_seed(0)
    history, old = hf_spec.RolloutHistory(), expected()
    before = rollout(model, history, prompt(12, 1).expand(rows, -1), **settings)
    assert p_value(before.sequences, old) > 1e-4
    change(model, 0.05)
    new = expected()
    after = rollout(model, history, prompt(12, 1).expand(rows, -1), **settings)
    assert 0.2 * rows < kept(after) < rows
    assert p_value(after.sequences, new) > 1e-4
    assert p_value(before.sequences, new) < 1e-4


def test_lenience(fresh: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps more of the earlier answers in rollouts that sample, and nothing else."""
    monkeypatch.setattr(rollouts, "SHARE", 0.0)
    model, old = fresh("llama"), fresh("llama").state_dict()
    inputs = prompt(12, 1).expand(40, -1)
    found = {}
    for lenience in (1.0, 1.5, 1000.0):
        model.load_state_dict(old)
        torch.manual_seed(0)
        history = hf_spec.RolloutHistory(lenience=lenience)
        first = rollout(model, history, inputs, top_k=0)
        change(model, 0.02)
        found[lenience] = rollout(model, history, inputs, top_k=0)
        greedy = generate(model, inputs[:1], do_sample=False, max_new_tokens=24)
        ours = rollout(model, history, inputs[:1], do_sample=False)
        assert torch.equal(ours.sequences, greedy.sequences)
    assert kept(found[1.0]) < kept(found[1.5]) < kept(found[1000.0])
    same = found[1000.0].sequences == first.sequences
    assert same[:, 13:].all(1)[same[:, 12]].all(), "the first token is the prompt's"


def test_when_answers_are_used(fresh: Tiny) -> None:
    """Once, after a change of weights; each generation of a prompt has one of its own."""
    history, model, two = hf_spec.RolloutHistory(), fresh("llama"), prompt(12, 1).expand(2, -1)
    first = rollout(model, history, two)
    assert kept(first) == 0
    again = rollout(model, history, two)  # in the same epoch
    assert kept(again) == 0
    change(model, 1e-7)
    four = rollout(model, history, prompt(12, 1).expand(5, -1))
    assert torch.equal(four.sequences[:4], torch.cat([first.sequences, again.sequences]))
    assert four.spec_stats.num_steps == 24 and kept(four) == 4 * 21  # the fifth is new
    assert first.spec_stats.plain_seconds > 0
    assert len({tuple(row) for row in four.sequences.tolist()}) == 5
    frozen, model = hf_spec.RolloutHistory(), fresh("llama").requires_grad_(False)
    rollout(model, frozen, two)
    change(model, 1e-7)
    assert kept(rollout(model, frozen, two)) == 0, "what is not trained does not change"


def test_old_tokens_of_few_rows_are_not_verified(fresh: Tiny) -> None:
    """The other rows would be padded for nothing."""
    history, model = hf_spec.RolloutHistory(), fresh("llama")
    one = prompt(12)
    rollout(model, history, one)
    change(model, 1e-7)
    assert kept(rollout(model, history, torch.cat([one, prompt(12, 1, seed=7)]))) == 0


def test_fresh_rollouts(fresh: Tiny, tmp_path: Path) -> None:
    torch.manual_seed(1)
    history, model = hf_spec.RolloutHistory(fresh=0.5), fresh("llama")
    many = prompt(12, 1).expand(40, -1)
    first = rollout(model, history, many)
    change(model, 1e-7)
    same = (rollout(model, history, many).sequences == first.sequences).all(1).sum()
    assert 8 < same < 32  # outside once in 30,000 times
    assert len(lengths(history, tmp_path / "answers")) == 40


def test_bounds_and_state(fresh: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    history, model = hf_spec.RolloutHistory(max_tokens=80), fresh("llama")
    one, two = prompt(12), prompt(12, seed=7)
    for inputs in (one, two, one, two):
        rollout(model, history, inputs)
    assert lengths(history, path) == [24, 24], "the older prompt's are dropped"
    first = rollout(model, history, one)
    history.save(path)
    again = hf_spec.RolloutHistory()
    again.load(path)
    loaded = rollout(model, again, one)  # a process that resumes does not know of the weights
    assert torch.equal(loaded.sequences, first.sequences) and kept(loaded) == 21
    hf_spec.RolloutHistory().save(path)
    again.load(path)
    assert kept(rollout(model, again, one)) == 0


def test_answers_on_disk(fresh: Tiny, tmp_path: Path) -> None:
    """Are there after an interrupted process, and for one history at a time."""
    path, model = tmp_path / "answers", fresh("llama")
    history = hf_spec.RolloutHistory(path=path)
    first = rollout(model, history, prompt(12))
    with pytest.raises(ValueError, match="a new file, or a history's that is not in use: .*locked"):
        hf_spec.RolloutHistory(path=path)
    assert copy.deepcopy(history) is history
    assert repr(pickle.loads(pickle.dumps(history))) == repr(hf_spec.RolloutHistory())
    del history
    gc.collect()
    again = hf_spec.RolloutHistory(path=path)
    ours = rollout(model, again, prompt(12))
    assert torch.equal(ours.sequences, first.sequences) and kept(ours) == 21
    assert lengths(again, tmp_path / "others") == [24]


def test_a_config_is_printed_and_saved(tmp_path: Path) -> None:
    """With the arguments; the answers are no part of it."""
    history = hf_spec.RolloutHistory(fresh=0.25, path=tmp_path / "answers")
    config = hf_spec.SpecConfig("plain", {"history": history})
    assert '"fresh": 0.25' in repr(config)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"history=.*'fresh': 0.25.*give a hf_spec.RolloutHistory"):
        hf_spec.SpecConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "content",
    [None, b"no database", "create table others (x)", "create table answers (prompt, seed)",
     "create table answers (prompt, seed, tokens, seen, id);"
     "insert into answers values (x'00', 1, 'text', 1, 1)"],
)  # fmt: skip
def test_a_file_without_answers(content: Any, fresh: Tiny, tmp_path: Path) -> None:
    """Leaves the answers as they were."""
    history, model, path = hf_spec.RolloutHistory(), fresh("llama"), tmp_path / "answers"
    rollout(model, history, prompt(12))
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        with closing(sqlite3.connect(path)) as file:
            file.executescript(content)
            file.commit()
    with pytest.raises(ValueError, match=r"answers' holds no answers as RolloutHistory.save"):
        history.load(path)
    assert lengths(history, tmp_path / "others") == [24]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0: must be a whole number"),
        ({"fresh": 2}, "fresh=2: must be a number in"),
        ({"lenience": 0.5}, "lenience=0.5: must be a number in"),
        ({"path": "/nowhere/x"}, r"path='/nowhere/x': .* unable to open database file"),
    ],
)
def test_bad_input(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_spec.RolloutHistory(**given)


def test_bad_calls(fresh: Tiny) -> None:
    with pytest.raises(ValueError, match="history='x': give a hf_spec.RolloutHistory"):
        rollout(fresh("llama"), "x", prompt())
    with pytest.raises(ValueError, match="history=.* it belongs to acceptance='match'"):
        generate(
            fresh("llama"), prompt(),
            **strategy("prompt_lookup", history=hf_spec.RolloutHistory(), acceptance="typical"),
        )  # fmt: skip
