"""Rollouts drafted by the answers of earlier ones: the same distribution, fewer steps."""

import copy
import gc
import os
import pickle
import sqlite3
from array import array
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
from hf_spec.draft import rollouts

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


def test_calls_of_another_model_are_no_change_of_weights(fresh: Tiny) -> None:
    """An answer would else be given again, and not another one sampled."""
    history, model, other = hf_spec.RolloutHistory(), fresh("llama"), fresh("llama_tied")
    first = rollout(model, history, prompt(12))
    rollout(other, history, prompt(9))
    second = rollout(model, history, prompt(12))
    assert kept(second) == 0 and not torch.equal(first.sequences, second.sequences)
    change(model, 1e-7)
    assert kept(rollout(model, history, prompt(12))) == 21


@pytest.mark.usefixtures("hooks_count")
def test_hooks_that_may_tell_tokens_apart_see_one_token_at_a_time(fresh: Tiny) -> None:
    """Earlier answers are several."""
    history, model, widths = hf_spec.RolloutHistory(), fresh("llama"), list[int]()
    call = partial(rollout, model, history, prompt(12), do_sample=False, temperature=None)
    call()
    change(model, 0.001)

    def noted(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        widths.append(output.shape[1])
        return output

    model.model.layers[1].register_forward_hook(noted)
    out = call()
    assert widths[-20:] == [1] * 20 and out.spec_stats.num_drafted_tokens == 0


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


@pytest.mark.parametrize("tokens", [(20, 8), (8, 20)])
def test_calls_at_once_to_a_prompt(fresh: Tiny, tmp_path: Path, tokens: tuple[int, int]) -> None:
    """Each has an answer of its own, and the bound holds, whichever call ends first."""
    history, model, one = hf_spec.RolloutHistory(max_tokens=60), fresh("llama"), prompt(12)
    rollout(model, history, one, max_new_tokens=8)
    for _ in range(4):
        change(model, 1e-7)
        inside = Inside(partial(rollout, model, history, one, max_new_tokens=tokens[1]))
        outer = rollout(model, history, one, max_new_tokens=tokens[0], streamer=inside)
        answers = [output.sequences[0, 12:20].tolist() for output in (outer, inside.output)]
        assert answers[0] != answers[1], "the same numbers twice"
        kept_now = lengths(history, tmp_path / "answers")
        assert history._size == sum(kept_now) <= 60 and {*tokens} <= {*kept_now}
    before = lengths(history, tmp_path / "answers")
    change(model, 1e-7)
    with pytest.raises(RuntimeError, match="a call that fails"):
        rollout(model, history, one, logits_processor=[Failing()])
    gc.collect()
    assert lengths(history, tmp_path / "answers") == before
    assert kept(rollout(model, history, one)) > 0, "what a failed call had is free again"


class Inside:
    """A streamer that makes another call within the first one."""

    def __init__(self, call: Any) -> None:
        self.call, self.puts = call, 0

    def put(self, _: Any) -> None:
        self.puts += 1
        if self.puts == 2:
            self.output = self.call()

    def end(self) -> None: ...


class Failing:
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a call that fails")


def test_a_full_disk(fresh: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Costs no answer that a call gives, and is said once."""
    path, model = tmp_path / "answers", fresh("llama")
    history = hf_spec.RolloutHistory(path=path)
    first = rollout(model, history, prompt(12))
    pages = history._rows.execute("pragma page_count").fetchone()[0]
    history._rows.execute(f"pragma max_page_count = {pages}")
    change(model, 1e-7)
    many, two = prompt(12, 1).expand(20, -1), prompt(12, 1).expand(2, -1)
    for number in range(2):  # the old answer drafts once, though it cannot be replaced
        ours = rollout(model, history, many, max_new_tokens=100)
        assert ours.sequences.shape == (20, 112)
        same = (ours.sequences[:, :36] == first.sequences).all(1).sum()
        assert same == (number == 0)
        assert history._size == sum(lengths(history, tmp_path / "others")) == 24
    said = [one.getMessage() for one in caplog.records if "cannot be kept" in one.getMessage()]
    assert len(said) == 1 and "is full" in said[0] and str(path) in said[0]
    history._rows.execute("pragma max_page_count = 100000")
    rollout(model, history, two)
    assert lengths(history, tmp_path / "others") == [24, 24, 24], "there is room again"


def test_a_file_that_cannot_be_read(
    fresh: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, history = fresh("llama"), hf_spec.RolloutHistory(path=tmp_path / "answers")
    history._rows.execute("drop table answers")
    for _ in range(2):
        assert rollout(model, history, prompt(12)).sequences.shape == (1, 36)
    assert caplog.text.count("no such table") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_leaves_the_file_alone(fresh: Tiny, tmp_path: Path) -> None:
    """It has answers of its own, in memory."""
    model, place = fresh("llama"), tmp_path / "in the child"
    history = hf_spec.RolloutHistory(path=tmp_path / "answers")
    rollout(model, history, prompt(12))
    earlier = history.begin(model, [[1, 2]], torch.device("cpu"))
    if not (child := os.fork()):
        try:
            history.add(earlier, [[3, 4, 5]])
            os._exit(lengths(history, place) != [3])
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert lengths(history, tmp_path / "others") == [24]


@pytest.mark.parametrize("name", ["prompt_lookup", "plain"])
def test_answers_of_a_larger_vocabulary(fresh: Tiny, tmp_path: Path, name: str) -> None:
    """Draft up to the first token that the model does not have."""
    history, model = hf_spec.RolloutHistory(), fresh("llama")
    greedy = {"do_sample": False, "temperature": None, "top_k": None}
    answer = rollout(model, history, prompt(12), name, **greedy).sequences[0, 12:].tolist()
    for unknown in (61, 2**31 - 1, -1, -100):
        path = tmp_path / "answers"
        history.save(path)
        with closing(sqlite3.connect(path)) as file, file:
            tokens = array("i", [*answer[:9], unknown, *answer[10:]]).tobytes()
            file.execute("update answers set tokens = ?", (tokens,))
        history.load(path)
        ours = rollout(model, history, prompt(12), name, **greedy)
        assert ours.sequences[0, 12:].tolist() == answer
        assert ours.spec_stats.num_steps == 16 or name == "prompt_lookup"
        change(model, 0.0)


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


@pytest.mark.parametrize("way", ["save", "load"])
def test_answers_on_disk_are_saved_already(
    fresh: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model, history = fresh("llama"), hf_spec.RolloutHistory(path="answers")
    rollout(model, history, prompt(12))
    getattr(history, way)(tmp_path / "answers")
    rollout(model, history, prompt(9))
    del history
    gc.collect()
    later = hf_spec.RolloutHistory(path=tmp_path / "answers")
    assert lengths(later, tmp_path / "others") == [24, 24], "those of later calls, too"


def test_a_config_is_printed_and_saved(fresh: Tiny, tmp_path: Path) -> None:
    """Without the history: a checkpoint of the training generates as any other."""
    history, model = hf_spec.RolloutHistory(path=tmp_path / "answers"), fresh("llama")
    config = hf_spec.SpecConfig("plain", {"history": history})
    assert '"history": null' in repr(config)
    config.save_pretrained(tmp_path)
    assert hf_spec.SpecConfig.from_pretrained(tmp_path).assistant_kwargs["history"] is None
    model.generation_config.assistant_strategy = "prompt_lookup"
    model.generation_config.assistant_kwargs = {"history": history, "max_depth": 3}
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.generation_config.assistant_kwargs["max_depth"] == 3
    plain = generate(fresh("llama"), prompt(9), max_new_tokens=6)
    assert torch.equal(generate(again, prompt(9), max_new_tokens=6).sequences, plain.sequences)
    assert lengths(history, tmp_path / "others") == [], "the reloaded model has none"


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


@pytest.mark.parametrize(
    "values", ["1, 'text', 5, 1, 1, x'00000000'", "1, x'00', 'text', 1, 1, x'00000000'",
               "1, x'00', 5, 1, 'text', x'00000000'", f"1, x'00', 5, 1, {2**62}, x'00000000'",
               "1, x'00', 5, 1, 1, x'000000'", f"{2**63 - 1}, x'00', 5, 1, 1, x'00000000'"]
)  # fmt: skip
def test_a_file_of_others(values: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "answers")) as file, file:
        file.execute("create table answers (id integer primary key, prompt, seed, round, seen, "
                     "tokens)")  # fmt: skip
        file.execute(f"insert into answers values ({values})")
    with pytest.raises(ValueError, match="its answers are not as a history writes them"):
        hf_spec.RolloutHistory(path=tmp_path / "answers")


def test_bad_calls(fresh: Tiny) -> None:
    with pytest.raises(ValueError, match="history='x': give a hf_spec.RolloutHistory"):
        rollout(fresh("llama"), "x", prompt())
    with pytest.raises(ValueError, match="history=.* it belongs to acceptance='match'"):
        generate(
            fresh("llama"), prompt(),
            **strategy("prompt_lookup", history=hf_spec.RolloutHistory(), acceptance="typical"),
        )  # fmt: skip
