"""``hf_spec.benchmark``: the same figures as the command's, for models that are in memory."""

import json
import re

import forks
import pytest
from adapter_oracle import added
from peft import LoraConfig, get_peft_model
from tiny_checkpoint import CONTEXT, make_model, make_tokenizer, save_checkpoint, write_prompts
from two_tokenizers import make

import hf_spec
from hf_spec.tools import cli

TEXTS = ["abc abc abc abc", "one two one two", "xyzxyzxyz", "hello hello", "q q q"]
FIGURES = {
    "strategy", "task", "batch_size", "baseline", "synthetic_acceptance", "prompts", "new_tokens",
    "seconds", "tokens_per_second", "speedup", "speedup_interval", "tau", "tau_interval",
    "tau_without_prefill",
    "identical", "diverged_at_tie", "diverged", "stats",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def result(tokenizer):
    strategies = {"prompt_lookup": {}, "prompt_lookup:one": {"num_draft_tokens": 1}}
    return hf_spec.benchmark(make_model(), tokenizer, TEXTS, strategies, max_new_tokens=16)


def test_rows_have_the_documented_schema(result):
    assert [(row["strategy"], row["task"]) for row in result.rows] == [
        (name, task)
        for name in ("generate", "prompt_lookup", "prompt_lookup:one")
        for task in ("default", "all")
    ]
    documented = {*re.findall(r"``(\w+)``", type(result).rows.__doc__)}
    for row in result.rows:
        assert {*row} == FIGURES <= documented
        assert row["prompts"] == row["identical"] == len(TEXTS)
    json.dumps(result.rows)  # JSON types
    settings = result.settings["strategies"]["prompt_lookup:one"]
    assert settings["assistant_kwargs"] == {"num_draft_tokens": 1}


def test_table_frame_and_plot(result):
    text = str(result)
    assert re.search(r"prompt_lookup:one +[\d.]+ +[\d.]+x .*5 identical", text)
    assert "intervals in brackets" in text and "generate=1.00x" in repr(result)
    assert "rest of generate() " in text
    frame = result.to_pandas()
    assert [*frame["strategy"]] == [row["strategy"] for row in result.rows]
    assert {*frame.columns} == FIGURES - {"stats"}
    axes = result.plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "prompt_lookup", "prompt_lookup:one",
    ]  # fmt: skip
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [result.overall(name)["speedup"] for name in result.settings["strategies"]][1:]


def test_chats_rows_and_batches(tokenizer):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abc abc"}]
    given = [chat, {"question": "one two one", "category": "sums"}, "xyz xyz"]
    found = hf_spec.benchmark(
        make_model(), tokenizer, given, max_new_tokens=4, batch_size=(1, 2), do_sample=True, seed=3
    )
    assert [prompt.full_text for prompt in found.prompts] == [
        "be brief\n\nabc abc",
        *given[1:2][0:0],
        "one two one",
        "xyz xyz",
    ]
    assert {row["task"] for row in found.rows} == {"default", "sums", "all"}
    assert {row["batch_size"] for row in found.rows} == {1, 2}
    one = {
        row["strategy"]: row for row in found.rows if (row["batch_size"], row["task"]) == (1, "all")
    }
    assert one["auto"]["identical"] == 3  # the same random numbers


def test_adapters_stay_as_they_are(tokenizer):
    model = make_model()
    added(model, hf_spec.MedusaConfig())
    wrapped = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"]))
    few = {"max_new_tokens": 6}
    found = hf_spec.benchmark(
        model, tokenizer, TEXTS[:2], {"medusa": {"drafting": "always"}}, **few
    )
    assert found.overall("medusa")["identical"] == 2
    found = hf_spec.benchmark(wrapped, tokenizer, TEXTS[:2], "plain", **few)
    assert found.overall("generate")["tau"] == found.overall("plain")["tau"] == 1.0
    assert wrapped.active_adapter == "default"


def test_an_assistant_drafts(tokenizer):
    names = ["draft_model", "transformers:assisted"]
    found = hf_spec.benchmark(
        make_model(), tokenizer, TEXTS[:2], names, max_new_tokens=6, assistant_model=make_model()
    )
    assert [found.overall(name)["identical"] for name in names] == [2, 2]
    assert "assistant_model" not in found.settings["strategies"]["draft_model"]


def test_an_assistant_with_another_tokenizer(tokenizer):
    own = make([bytes([255 - byte]) for byte in range(256)])
    found = hf_spec.benchmark(
        make_model(), tokenizer, TEXTS[:2], {"draft_model": {"drafting": "always"}},
        max_new_tokens=6, assistant_model=make_model(), assistant_tokenizer=own,
    )  # fmt: skip
    assert found.overall("draft_model")["identical"] == 2
    settings = found.settings["strategies"]["draft_model"]
    assert not {"tokenizer", "assistant_tokenizer"} & settings.keys()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": []}, "nothing to measure: no prompts"),
        ({"prompts": "abc"}, "prompts='abc': give a list of prompts"),
        ({"prompts": ["abc", ""]}, r"prompts\[1\]: 'prompt' must hold a text that is not empty"),
        ({"prompts": ["abc", 3]}, r"prompts\[1\]=3: give a text, a chat or a row"),
        ({"prompts": ["abc", []]}, r"prompts\[1\]: 'messages' must be a list of messages"),
        ({"prompts": 3}, "prompts=3: give a list of prompts"),
        ({"model": "m"}, "model=str, tokenizer=.*: give a model that is loaded"),
        ({"model": make_tokenizer(), "tokenizer": make_model()}, "They are the wrong way round"),
        ({"tokenizer": None}, "tokenizer=NoneType: give the model's tokenizer"),
        ({"tokenizer": "m"}, "tokenizer=str: give the model's tokenizer"),
        ({"strategies": 3}, "strategies=3: give names"),
        ({"strategies": [3]}, "strategy 3: give the name of a strategy"),
        ({"strategies": {"plain": 3}}, "'plain': 3 must be a dict of options"),
        ({"seed": "x"}, "seed='x': must be a whole number"),
        ({"batch_size": 1.5}, "batch_size=1.5: must be a whole number"),
        ({"max_tokens": 4}, r"no argument 'max_tokens' \(did you mean 'max_new_tokens'\?\)"),
        ({"prompts": [[{"role": "assistant", "content": "a"}]]}, "the last message must be the us"),
        ({"strategies": "medusas"}, r"strategy='medusas' \(did you mean 'medusa'\?\)"),
        ({"strategies": {"plain": {"num_draft_tokens": 3}}}, "'plain' has no option 'num_draft_t"),
        ({"strategies": "medusa"}, "medusa: .*needs an active adapter of type MEDUSA"),
        ({"strategies": "draft_model"}, "give the smaller model that drafts, assistant_model="),
        ({"assistant_model": 3}, "assistant_model=int: no strategy here drafts with it"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be a whole number of at least 1"),
        ({"max_new_tokens": CONTEXT}, "leaves no room for a prompt"),
        ({"batch_size": 0}, "batch_size=0: must be a whole number of at least 1"),
        ({"limit": 0}, "limit=0: must be a whole number of at least 1"),
        ({"assistant_kwargs": {"tree": "chain"}}, "assistant_kwargs=.* sets this itself"),
        ({"temperatur": 1}, "generate: .*temperatur"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(given, message, tokenizer):
    usual = {"model": make_model(), "tokenizer": tokenizer, "prompts": TEXTS[:1]}
    arguments = {**usual, "strategies": "prompt_lookup", "max_new_tokens": 4, **given}
    with pytest.raises(ValueError, match=message):
        hf_spec.benchmark(**arguments)


def test_the_command_measures_the_same(tmp_path, capsys, tokenizer):
    save_checkpoint(tmp_path / "m")
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": text} for text in TEXTS[:2]])
    words = f"bench --model {tmp_path / 'm'} --prompts {prompts} --max-new-tokens 6 --dtype float32"
    assert cli.main([*words.split(), "--output", str(tmp_path / "out"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found = hf_spec.benchmark(
        make_model(), tokenizer, TEXTS[:2], "token_recycling", max_new_tokens=6
    )
    counts = ("strategy", "task", "prompts", "new_tokens", "identical")
    assert [[row[name] for name in counts] for row in shown] == [
        [row[name] for name in counts] for row in found.rows
    ]


def test_the_library_does_not_load_it() -> None:
    done = forks.run("""
    import sys, hf_spec
    assert "benchmark" in dir(hf_spec)
    assert not [name for name in sys.modules if name.startswith("hf_spec.tools")]
    assert hf_spec.benchmark is sys.modules["hf_spec.tools.bench.runner"].benchmark
    """)
    assert done.returncode == 0, done.stderr
