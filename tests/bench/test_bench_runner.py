"""The measuring itself, on a tiny model: every figure is worked out a second time here."""

import copy
import json
from contextlib import nullcontext

import pytest
import torch
from adapter_oracle import added
from peft import LoraConfig, get_peft_model
from running import drafting
from tiny_checkpoint import CONTEXT, make_model, make_tokenizer, save_checkpoint, write_prompts

import hf_spec
from hf_spec.adapters.loading import active_names
from hf_spec.tools import cli
from hf_spec.tools.bench import runner
from hf_spec.tools.bench import runner as session
from hf_spec.tools.bench.checking import supported
from hf_spec.tools.bench.contenders import SyntheticRates, add_untrained, contenders, parse_names
from hf_spec.tools.bench.prompts import Prompt, encode
from hf_spec.tools.bench.runner import run as run_contenders
from hf_spec.tools.loading import Adapter, load_adapters, read_adapters

NEW = 24
STOCK = "transformers:prompt_lookup"


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def prompts():
    texts = ["abc abc abc abc", "one two one two", "xyzxyzxyz", "hello hello", "q"]
    return [Prompt(text, "ab"[i % 2], i) for i, text in enumerate(texts)]


def run(model, tokenizer, prompts, names, options=None, **settings):
    """A benchmark of strategies by their names."""
    lineup = contenders(parse_names(names), options)
    return run_contenders(model, tokenizer, prompts, lineup, **settings)


def plain_tokens(model, tokenizer, prompt: Prompt) -> list[int]:
    ids = encode(tokenizer, prompt.text)
    out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    new = out[0, len(ids) :].tolist()
    return new[: new.index(1) + 1] if 1 in new else new


def test_every_figure_worked_out_again(model, tokenizer, prompts):
    every_step = {"prompt_lookup": {"drafting": "always"}}
    names = ["prompt_lookup", STOCK]
    result = run(model, tokenizer, prompts, names, every_step, max_new_tokens=NEW)
    expected = [plain_tokens(model, tokenizer, prompt) for prompt in prompts]
    rows = {(row["strategy"], row["task"]): row for row in result.rows}
    for name in ("generate", "prompt_lookup", STOCK):
        for task, members in (("a", [0, 2, 4]), ("b", [1, 3]), ("all", [0, 1, 2, 3, 4])):
            row = rows[name, task]
            assert row["prompts"] == len(members) == row["identical"]
            assert row["new_tokens"] == sum(len(expected[i]) for i in members)
    assert rows["generate", "all"]["tau"] == 1.0 < rows[STOCK, "all"]["tau"]
    # Our own tau is the one that the statistics of each call give.
    steps = 0
    for prompt in prompts:
        ids = torch.tensor([encode(tokenizer, prompt.text)])
        model.generate(ids, max_new_tokens=NEW, do_sample=False, **drafting("prompt_lookup"))
        steps += hf_spec.last_stats(model).num_row_steps
    assert rows["prompt_lookup", "all"]["tau"] == pytest.approx(sum(map(len, expected)) / steps)


def test_a_call_that_is_repeated_does_not_know_its_answer(model, tokenizer, prompts, monkeypatch):
    """As calls that compile are; the table that calls share has learned from the first try."""
    names, every_step = ["token_recycling"], {"drafting": "always", "num_draft_tokens": 7}
    given = model, tokenizer, prompts, names, {"token_recycling": every_step}
    once = run(*given, max_new_tokens=NEW)
    timed, calls = session.Session._timed, []

    def compiling(self, contender, *args):
        *found, stats = timed(self, contender, *args)
        if stats is not None:
            calls.append(contender.name)
            stats.details["compiled"] = {"made": len(calls) % 2 == 0}  # the first is a warm-up
        return *found, stats

    monkeypatch.setattr(session.Session, "_timed", compiling)
    twice = run(*given, max_new_tokens=NEW)
    assert len(calls) == 1 + 2 * len(prompts)
    assert [row["tau"] for row in twice.rows] == [row["tau"] for row in once.rows]


def test_batches_equal_single_rows_and_long_prompts_are_cut(model, tokenizer, prompts):
    prompts = [*prompts[:4], Prompt("word " * 200, "a", 5)]
    result = run(
        model, tokenizer, prompts, ["prompt_lookup", STOCK],
        batch_sizes=[1, 2], max_new_tokens=NEW,
    )  # fmt: skip
    assert {(row["strategy"], row["batch_size"]) for row in result.rows} == {
        ("generate", 1), ("prompt_lookup", 1), (STOCK, 1), ("generate", 2), ("prompt_lookup", 2),
    }  # fmt: skip
    assert result.overall("prompt_lookup")["identical"] == len(prompts)
    assert result.overall("generate")["tau"] == 1.0
    single, batched = (
        {
            index: row
            for m in result.measurements
            if (m.strategy, m.batch_size) == ("generate", size)
            for index, row in zip(m.prompts, m.rows)
        }
        for size in (1, 2)
    )
    assert single == batched and len(single) == len(prompts)
    notes = " / ".join(result.notes)
    assert f"{STOCK} left out at batch size 2" in notes
    assert "1 of 3 batches have fewer than 2 rows" in notes
    assert result.truncated_prompts == 1
    assert "1 of 5 prompts did not fit the model's context" in notes


def test_conversations_go_on_with_the_models_own_answers(model, tokenizer, monkeypatch):
    """Those of plain generation, so that all are asked the same, also at larger batch sizes, where
    shorter conversations end earlier."""
    prompts = [
        Prompt("abc abc", "a", 0, later=("more", "and more")), Prompt("one two", "a", 1),
        Prompt("xyz", "b", 2, later=("go on",)),
    ]  # fmt: skip
    asked: dict[tuple[str, int], list[str]] = {}
    original = session.Session.generate

    def watched(self, contender, batch, rows, **overrides):
        made = original(self, contender, batch, rows, **overrides)
        if not overrides:  # those of the warm-up have some
            texts = asked.setdefault((contender.name, len(asked_sizes)), [])
            texts += map(tokenizer.decode, batch)
        if contender.name == "prompt_lookup":
            seconds, answers, steps, stats = made
            made = seconds, [[9] for _ in answers], steps, stats  # another answer
        return made

    monkeypatch.setattr(session.Session, "generate", watched)
    asked_sizes: list[int] = []
    for size in (1, 2):
        found = run(
            model, tokenizer, prompts, ["prompt_lookup"], max_new_tokens=8, batch_sizes=[size]
        )
        assert found.overall("generate")["prompts"] == 6
        assert found.overall("generate")["identical"] == 6
        asked_sizes.append(size)
    expected = []
    for prompt in prompts:
        chat = []
        for text in (prompt.text, *prompt.later):
            chat.append({"role": "user", "content": text})
            ids = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
            expected.append(tokenizer.decode(ids))
            out = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
            answer = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
            chat.append({"role": "assistant", "content": answer})
    assert len(asked) == 4
    assert all(sorted(texts) == sorted(expected) for texts in asked.values())


def test_rows_that_are_admitted_as_others_end(model, tokenizer, prompts, sizes):
    """Beside static batches, and Transformers' continuous batching."""
    names = ["prompt_lookup", STOCK]
    result = run(
        model, tokenizer, prompts[:5], names, batch_sizes=[2], max_new_tokens=NEW, continuous=True
    )
    rows = {row["strategy"]: row for row in result.rows}
    both = ["prompt_lookup", "prompt_lookup+continuous"]
    assert [*rows] == ["generate", "transformers:generate_batch", *both]
    for row in rows.values():
        assert row["task"] == "all" and row["prompts"] == row["identical"] == 5
        assert row["new_tokens"] == rows["generate"]["new_tokens"]
    calls = {name: [m.prompts for m in result.measurements if m.strategy == name] for name in rows}
    assert calls["generate"] == calls["prompt_lookup"] == [[0, 1], [2, 3], [4]]
    assert calls["transformers:generate_batch"] == [[0, 1, 2, 3, 4]] == calls[both[1]]
    assert max(sizes) == 2
    assert rows[both[1]]["stats"]["details"]["shared"]["rows"] <= 2
    refused = {"compiled": "inductor"}, {"synthetic": SyntheticRates((0.5,))}, {"protocol": {}}
    for more in refused:
        with pytest.raises(ValueError, match="continuous batches with .* Leave one out"):
            run(model, tokenizer, prompts, ["plain"], continuous=True, **more)


def test_order_rotates_and_wrong_outputs_are_counted(model, tokenizer, prompts, monkeypatch):
    order: list[str] = []
    original = session.Session.generate

    def spoil(self, contender, *args, **kwargs):
        order.append(contender.name)
        seconds, rows, steps, stats = original(self, contender, *args, **kwargs)
        if contender.name == "prompt_lookup":
            rows = [[*row[:-1], (row[-1] + 7) % 260] for row in rows]
        return seconds, rows, steps, stats

    monkeypatch.setattr(session.Session, "generate", spoil)
    calls: list[tuple[int, int]] = []
    told = nullcontext(lambda done, total: calls.append((done, total)))
    monkeypatch.setattr(runner, "progress_bar", lambda title, shown: told)
    result = run(model, tokenizer, prompts[:4], ["prompt_lookup", STOCK], max_new_tokens=4)
    names = ["generate", "prompt_lookup", STOCK]
    turns = [order[i : i + 3] for i in range(0, len(order), 3)]
    warm_up = names
    assert turns == [warm_up, names, names[1:] + names[:1], names[2:] + names[:2], names]
    assert calls == [(i, 12) for i in range(13)]
    found = [(row["diverged"], row["identical"]) for row in map(result.overall, names)]
    assert found == [(0, 4), (4, 0), (0, 4)]


def test_no_contender_sees_what_another_one_has_learned(model, tokenizer, prompts):
    """Else the second of two would draft the answers that the first one gave."""
    names = ["token_recycling:first", "token_recycling:second"]
    options = dict.fromkeys(names, {"drafting": "always"})
    result = run(model, tokenizer, prompts, names, options, max_new_tokens=NEW)
    steps = {name: [] for name in names}
    for one in result.measurements:
        if one.strategy in steps:
            steps[one.strategy].append(one.row_steps)
    assert steps[names[0]] == steps[names[1]]
    assert sum(steps[names[0]]) < NEW * len(prompts)


def test_the_models_own_sampling_defaults_do_not_interfere(tokenizer, prompts):
    model = make_model()
    model.generation_config.update(do_sample=True, temperature=0.5, top_k=3, pad_token_id=None)
    model.generation_config.assistant_strategy = "prompt_lookup"
    before = copy.deepcopy(model.generation_config.to_dict())
    result = run(model, tokenizer, prompts[:2], ["prompt_lookup"], max_new_tokens=NEW)
    assert model.generation_config.to_dict() == before
    assert result.overall("generate")["tau"] == 1.0  # plain is plain
    greedy = plain_tokens(make_model(), tokenizer, prompts[0])
    assert result.measurements[0].rows == [greedy]


def test_sampling_is_seeded(model, tokenizer, prompts):
    def sample(seed, *sizes):
        return run(
            model, tokenizer, prompts[:2], ["prompt_lookup"], max_new_tokens=8, seed=seed,
            generate_kwargs={"do_sample": True, "temperature": 2.0}, batch_sizes=sizes or (1,),
        )  # fmt: skip

    first, again, other = sample(1), sample(1), sample(2)
    assert [m.rows for m in first.measurements] == [m.rows for m in again.measurements]
    assert [m.rows for m in first.measurements] != [m.rows for m in other.measurements]
    # Float32: rounding does not make samples of the same numbers differ.
    for name in ("generate", "prompt_lookup"):
        row = first.overall(name)
        assert (row["identical"], row["diverged"]) == (2, 0)
    assert {row["identical"] for row in sample(1, 2).rows} == {None}


def test_what_cannot_work_is_said_before_measuring(model, tokenizer, prompts):
    with pytest.raises(ValueError, match="strategy='fastest': choose one of .*prompt_lookup"):
        run(model, tokenizer, prompts, ["fastest"])
    with pytest.raises(ValueError, match="^layer_skip: .*skip"):
        run(model, tokenizer, prompts, ["layer_skip"])
    with pytest.raises(ValueError, match="no prompts"):
        run(model, tokenizer, [], ["prompt_lookup"])
    with pytest.raises(ValueError, match=f"max_new_tokens={CONTEXT} leaves no room"):
        run(model, tokenizer, prompts, ["prompt_lookup"], max_new_tokens=CONTEXT)
    with pytest.raises(ValueError, match="at least 1"):
        run(model, tokenizer, prompts, ["prompt_lookup"], batch_sizes=[0])


def test_an_adapter_that_changes_the_model_has_its_own_plain_decoding(
    tokenizer, prompts, monkeypatch
):
    """And both are measured with the update in the weights, which are put back in the end."""
    model = make_model()
    before = [plain_tokens(model, tokenizer, prompt) for prompt in prompts[:2]]
    added(model, hf_spec.SpaceConfig(num_mask_tokens=2, update="lora"), "tuned", std=0.2)
    after = [plain_tokens(model, tokenizer, prompt) for prompt in prompts[:2]]
    assert before != after
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    weight = "model.layers.0.mlp.up_proj.weight"
    generate, changed = model.generate, []

    def watched(*args, **kwargs):
        changed.append(not torch.equal(original[weight], model.get_parameter(weight)))
        return generate(*args, **kwargs)

    monkeypatch.setattr(model, "generate", watched)
    lineup = contenders(["space"], None, [Adapter("folder/tuned", "tuned", "space", {}, True)])
    assert [item.name for item in lineup] == ["generate@tuned", "space"]
    everyone = [*lineup, *contenders(["prompt_lookup"])]
    result = run_contenders(model, tokenizer, prompts[:2], everyone, max_new_tokens=NEW)
    order = [item.name for item in result.contenders]
    turns = [order, order, order[1:] + order[:1]]  # first the warm-up
    assert changed == [name in ("space", "generate@tuned") for turn in turns for name in turn]
    assert all(torch.equal(original[name], p) for name, p in model.named_parameters())
    assert result.notes == []
    tokens = {m.strategy: m.rows for m in result.measurements if m.prompts == [0]}
    assert tokens["generate"][0] == tokens["prompt_lookup"][0] == before[0]
    assert tokens["generate@tuned"][0] == tokens["space"][0] == after[0]
    rows = {row["strategy"]: row for row in result.rows if row["task"] == "all"}
    assert all(row["identical"] == 2 for row in rows.values())
    speed = {name: row["tokens_per_second"] for name, row in rows.items()}
    assert rows["space"]["speedup"] == pytest.approx(speed["space"] / speed["generate@tuned"])
    assert rows["prompt_lookup"]["speedup"] == pytest.approx(
        speed["prompt_lookup"] / speed["generate"]
    )


def test_the_lora_of_a_model_stays_whichever_adapter_drafts(tmp_path, tokenizer, prompts):
    """In all calls, also those without a strategy, and the model is as it was in the end."""
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    for name, config in (("tuned", lora), ("medusa", hf_spec.MedusaConfig(num_heads=2))):
        get_peft_model(make_model(), config).save_pretrained(tmp_path / name)
    model = make_model()
    untuned = plain_tokens(model, tokenizer, prompts[0])
    model.load_adapter(str(tmp_path / "tuned"))
    tuned = plain_tokens(model, tokenizer, prompts[0])
    assert tuned != untuned
    adapters = read_adapters([str(tmp_path / "medusa")])
    load_adapters(model, adapters)
    bita = [Adapter("untrained", "untrained_bita", "bita", {})]
    add_untrained(model, bita)
    assert supported(model)["medusa"] is None
    active = active_names(model)
    assert active == {"default", "untrained_bita"}
    lineup = contenders(["medusa", "bita"], {}, [*adapters, *bita])
    result = run_contenders(model, tokenizer, prompts[:1], lineup, max_new_tokens=NEW)
    assert [one.rows for one in result.measurements] == 3 * [[tuned]]
    assert active_names(model) == active


def test_a_strategy_around_another_one_has_both_adapters(tokenizer, prompts):
    model = make_model()
    torch.manual_seed(0)
    model.add_adapter(hf_spec.BitaConfig(), "drafts")
    model.add_adapter(hf_spec.ProPDConfig(prune_layer=1), "prunes")
    drafts = Adapter("folder/drafts", "drafts", "bita", {})
    options = {"drafter": "bita", "prune": True, "drafting": "always"}  # step times are noise
    prunes = Adapter("folder/prunes", "prunes", "propd", options)
    lineup = contenders(["propd"], {}, [drafts, prunes])
    assert [item.adapters for item in lineup] == [("prunes", "drafts")]
    result = run_contenders(model, tokenizer, prompts[:2], lineup, max_new_tokens=NEW)
    rows = {row["strategy"]: row for row in result.rows if row["task"] == "all"}
    row = rows["propd"]
    assert row["identical"] == 2 and row["stats"]["num_pruned_tokens"] > 0
    with pytest.raises(ValueError, match="propd drafts with 'bita' here, for which 0 adapters"):
        contenders(["propd"], {}, [prunes])
    with pytest.raises(ValueError, match="'folder/drafts' is for strategy 'bita', which does not"):
        contenders(["propd"], {"propd": {"drafter": "heads"}}, [drafts, prunes])


def test_which_adapters_change_the_model(tmp_path):
    """Those of one type may do either; it is what their configs say."""
    configs = {
        "gated": ("space", hf_spec.SpaceConfig(update="gated")),
        "lora": ("space", hf_spec.SpaceConfig(update="lora")),
        "none": ("space", hf_spec.SpaceConfig(update="none")),
        "bita": ("bita", hf_spec.BitaConfig()),
    }
    for name, (strategy, config) in configs.items():
        config.save_pretrained(tmp_path / name)
        hf_spec.SpecConfig(strategy).save_pretrained(tmp_path / name)
    adapters = read_adapters(str(tmp_path / name) for name in configs)
    assert [one.changes_model for one in adapters] == [False, True, False, False]
    names = [one.name for one in contenders(["space", "bita"], adapters=adapters)]
    assert names == ["generate@lora", "space@gated", "space@lora", "space@none", "bita"]
    (tmp_path / "lora" / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"cannot read adapter .*lora': .*adapter_config\.json"):
        read_adapters([str(tmp_path / "lora")])


def test_contenders_whose_folders_have_one_name_are_told_apart():
    def adapter(path, changes=False):
        return Adapter(path, f"of {path}", "space", {}, changes)

    one, two, other = adapter("a/space", True), adapter("b/space", True), adapter("c/other")
    names = [item.name for item in contenders(["space"], adapters=[one, two, other])]
    assert names == [
        "generate@a/space", "generate@b/space", "space@a/space", "space@b/space", "space@other",
    ]  # fmt: skip
    plain = [item.baseline for item in contenders(["space"], adapters=[one, two, other])]
    assert plain == [*names[:2], *names[:2], "generate"]
    small = contenders(["draft_model"], assistants=["me/small", "you/small"])
    assert [item.name for item in small] == ["draft_model@me/small", "draft_model@you/small"]
    with pytest.raises(ValueError, match="adapter 'c/other' is given twice"):
        read_adapters(["c/other", "a/space", "c/other"])


def test_assistants(tmp_path, capsys):
    for name, layers in (("m", 2), ("small", 2), ("smaller", 1)):
        save_checkpoint(tmp_path / name, layers=layers)
    write_prompts(tmp_path / "p.jsonl", [{"prompt": "abab" * 4}, {"prompt": "one one"}])
    alone, other = (f"transformers:assisted@{name}" for name in ("small", "smaller"))
    status = cli.main([
        "bench", "--model", str(tmp_path / "m"), "--prompts", str(tmp_path / "p.jsonl"),
        "--assistant", str(tmp_path / "small"), "--assistant", str(tmp_path / "smaller"),
        "--strategies", "draft_model,transformers:assisted", "--max-new-tokens", "8",
        "--dtype", "float32", "--device", "cpu", "--output", str(tmp_path / "out"),
        "--batch-size", "1,2", "--strategy-kwargs", 'draft_model={"drafting": "always"}',
    ])  # fmt: skip
    assert status == 0, capsys.readouterr().err
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert data["environment"]["settings"]["strategies"][alone] == {}  # a model is no JSON
    overall = [run for run in data["runs"] if run["task"] == "all"]
    rows = {run["strategy"]: run for run in overall if run["batch_size"] == 1}
    assert rows[alone]["identical"] == rows[other]["identical"] == 2
    assert rows["draft_model@small"]["stats"]["num_draft_forwards"] > 0
    batched = [run["strategy"] for run in overall if run["batch_size"] == 2]  # stock takes a row
    assert batched == ["generate", "draft_model@small", "draft_model@smaller"]
