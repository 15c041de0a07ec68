"""The adapter repository: its files, its card, the custom_generate shim, and the upload."""

import functools
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call, create_autospec

import pytest
import torch
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from peft import PeftModel, get_peft_model
from running import configured
from tiny_checkpoint import load_checkpoint
from transformers import AutoTokenizer, GenerationMixin

import hf_spec
from hf_spec.adapters.config import shim_text
from hf_spec.adapters.loading import find_active
from hf_spec.core.checks import INSTALL
from hf_spec.tools import cli
from hf_spec.tools.hub import (
    attached,
    check_complete,
    push,
    read_spec_config,
    render_card,
    save_adapter,
    save_spec_config,
    write_card,
)

#: Adapters of the demo that are in the package, or stand beside the tests.
DEMO = sorted(
    folder.parent for root in (
        Path(hf_spec.__file__).parent / "tools" / "demo" / "adapters",
        Path(__file__).parents[1] / "fixtures" / "demo_adapters",
    ) for folder in root.glob("*/README.md")
)  # fmt: skip
OPTIONS = {"draft_exit": "fixed", "num_draft_tokens": 3, "drafting": "always"}


def results(strategy: str = "layer_skip", tasks: tuple[str, ...] = ("qa",)) -> dict[str, Any]:
    """As ``hf-spec bench`` writes them."""
    runs = [
        {
            "strategy": name, "task": task, "batch_size": 1, "baseline": "generate", "prompts": 4,
            "tokens_per_second": speed, "speedup": speed / 50, "tau": tau, "identical": 3,
            "diverged_at_tie": 1, "diverged": 0,
        }
        for name, speed, tau in (("generate", 50.0, 1.0), (strategy, 61.7, 1.8125))
        for task in (*tasks, "all")
    ]  # fmt: skip
    environment = {
        "device": "cpu", "device_name": "Abacus 3000", "threads": 2, "dtype": "bfloat16",
        "torch": "2.13.0", "transformers": "5.23.0", "peft": "0.21.2", "hf_spec": "0.1.0",
        "prompts": "some/where/test.jsonl", "prompts_sha256": "ab12",
        "settings": {"max_new_tokens": 64, "do_sample": False},
    }  # fmt: skip
    return {"environment": environment, "runs": runs}


@pytest.fixture(scope="module")
def saved(checkpoint: Path) -> Path:
    """A complete adapter folder."""
    folder = checkpoint.parent / "skip"
    config = hf_spec.LayerSkipConfig(skip_attention=[1], skip_mlp=[])
    with attached(load_checkpoint(checkpoint), config) as peft_model:
        save_adapter(peft_model, folder, "layer_skip", OPTIONS)
    (folder / "results.json").write_text(json.dumps(results()))
    write_card(folder)
    return folder


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """A copy of it that the test may change."""
    return Path(shutil.copytree(saved, tmp_path / "skip"))


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def spec(folder: Path, **fields: Any) -> None:
    edit(folder / "generation_config.json", **fields)


# -- files ---------------------------------------------------------------------------------------


def test_peft_saves_what_decoding_needs(checkpoint, tmp_path):
    """A folder that PEFT wrote is complete; options that were tuned since stay."""
    model = get_peft_model(load_checkpoint(checkpoint), hf_spec.LayerSkipConfig(skip_attention=[1]))
    model.save_pretrained(tmp_path)
    check_complete(tmp_path)
    config = hf_spec.SpecConfig.from_pretrained(tmp_path)
    assert (config.assistant_strategy, config.assistant_kwargs) == ("layer_skip", {})
    written = json.loads((tmp_path / "generation_config.json").read_text())
    save_spec_config(tmp_path / "ours", "layer_skip", {})
    assert written == json.loads((tmp_path / "ours" / "generation_config.json").read_text())

    save_spec_config(tmp_path, "layer_skip", OPTIONS)
    model.save_pretrained(tmp_path)
    check_complete(tmp_path)
    assert hf_spec.SpecConfig.from_pretrained(tmp_path).assistant_kwargs == OPTIONS


def test_no_file_of_the_machine_is_stored(adapter):
    """Nor used, if somebody else has stored it; it would be uploaded, too."""
    message = "skip': its lookup_history='/my/file' is a file of the machine. Take it out, and"
    before = (adapter / "generation_config.json").read_text()
    with pytest.raises(ValueError, match=message):
        save_spec_config(adapter, "layer_skip", {"lookup_history": "/my/file"})
    assert (adapter / "generation_config.json").read_text() == before
    spec(adapter, assistant_kwargs={"lookup_history": "/my/file"})
    for work in (check_complete, write_card):
        with pytest.raises(ValueError, match=message):
            work(adapter)


def test_other_weights_have_not_been_measured(checkpoint, adapter):
    model, file = load_checkpoint(checkpoint), adapter / "results.json"
    for rank, measured in ((0, True), (2, False)):
        config = hf_spec.LayerSkipConfig(skip_attention=[1], draft_rank=rank)
        with attached(model, config) as peft_model:
            save_adapter(peft_model, adapter, "layer_skip", OPTIONS)
        assert file.is_file() == measured


def test_an_adapter_of_another_type_is_not_replaced(checkpoint, adapter):
    before = {path: path.read_bytes() for path in adapter.rglob("*") if path.is_file()}
    with (
        attached(load_checkpoint(checkpoint), hf_spec.MedusaConfig(num_heads=1)) as peft_model,
        pytest.raises(
            ValueError, match="skip' holds an adapter of type LAYER_SKIP, in whose place"
        ),
    ):
        save_adapter(peft_model, adapter, "medusa", {})
    assert {p: p.read_bytes() for p in adapter.rglob("*") if p.is_file()} == before


def test_transformers_saves_what_decoding_needs(checkpoint, tmp_path):
    """It writes the base's generation config first, which is kept and completed."""
    model = load_checkpoint(checkpoint)
    model.add_adapter(hf_spec.LayerSkipConfig(skip_attention=[1]))
    model.save_pretrained(tmp_path)
    config = hf_spec.SpecConfig.from_pretrained(tmp_path)
    assert config.assistant_strategy == "layer_skip" and config.pad_token_id == 0
    made = shim(tmp_path / "custom_generate" / "generate.py")
    assert made["SETTINGS"]["strategy"] == "layer_skip"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "README.md").unlink(), r"no README.md; 'hf-spec card"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors$"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"xx"), "is no safetensors file"),
        (lambda f: (f / "adapter_model.bin").write_bytes(b""), "can run code when loaded"),
        (lambda f: (f / "generation_config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "generation_config.json").write_text("[]"), "must hold a JSON object"),
        (lambda f: (f / "generation_config.json").write_text("{}"), "names no assistant_strategy"),
        (lambda f: spec(f, assistant_kwargs={"num_draft_tokens": 0}), "num_draft_tokens=0"),
        (lambda f: spec(f, assistant_kwargs={"num_draft_tokens": 4}), "does not say what"),
        (lambda f: spec(f, assistant_strategy="prompt_lookup", assistant_kwargs={}),
         "is of type 'LAYER_SKIP', but generation_config.json names strategy 'prompt_lookup'"),
    ],
)  # fmt: skip
def test_incomplete_folders(adapter, spoil, message):
    spoil(adapter)
    with pytest.raises(ValueError, match=message):
        check_complete(adapter)
    with pytest.raises(ValueError, match=message):
        push(adapter, "org/name", base_model="org/base")


# -- card ----------------------------------------------------------------------------------------


def test_the_card_holds_what_was_measured(adapter):
    card = (adapter / "README.md").read_text()
    row = "| 4 | 50.0 | 61.7 | 1.23x | 1.81 | 3 of 4 identical, 1 differ at a tie |"
    assert row in card
    for word in (
        "Abacus 3000, threads: 2;", "bfloat16", "torch 2.13.0", "transformers 5.23.0",
        "Prompts: `test.jsonl`.",
        "**Lossless.**", "| `num_draft_tokens` | `3` |", "| attention skipped | 1 |",
        "| MLP skipped | none |", "`LAYER_SKIP`", "some layers left out",
    ):  # fmt: skip
        assert word in card, word
    assert "some/where" not in card and "development prompts" not in card
    assert "\n\n\n" not in card and "None" not in card


def test_the_metadata_of_a_card(adapter):
    """As the Hub reads them: it shows no code of PEFT's, which does not know these adapters."""
    (adapter / "README.md").unlink()
    write_card(adapter, "org/skip", "org/base", license="mit", language=["en", "de"])
    data = ModelCard.load(adapter / "README.md").data
    assert (data.library_name, data.base_model) == ("hf_spec", "org/base")
    assert data.base_model_relation == "adapter" and data.pipeline_tag == "text-generation"
    assert {"hf_spec", "speculative-decoding", "layer_skip"} <= set(data.tags)
    assert (data.license, data.language, data.model_name) == ("mit", ["en", "de"], "skip")
    found = {one.metric_type: one for one in data.eval_results}
    assert found["tau"].metric_value == 1.812 and found["speedup"].metric_value == 1.234
    assert found["tokens_per_second"].metric_value == 61.7
    assert {one.dataset_name for one in data.eval_results} == {"test.jsonl"}
    assert "Abacus 3000" in found["speedup"].metric_name
    # What was measured goes with its file; what a person said of it stays.
    (adapter / "results.json").unlink()
    write_card(adapter, "org/skip", "org/base")
    data = ModelCard.load(adapter / "README.md").data
    assert data.license == "mit" and data.eval_results is None
    # A base that nobody else has is not named.
    data = ModelCard(render_card(adapter)).data
    assert data.base_model is None and "base_model_relation" not in data


def test_the_figures_of_a_suite(adapter):
    """Each size of trees has its tau in the metadata, with the protocol in words."""
    data = results("layer_skip", ("mt_bench", "qa"))
    protocol = {"suite": "spec-bench", "groups": ["mt_bench", "qa"]}
    data["environment"]["settings"] |= {"protocol": protocol, "max_new_tokens": 256}
    plain, own = data["runs"][:3], data["runs"][3:]
    sizes = {"layer_skip:8": 2.0, "layer_skip:chain3@skip": 1.5}
    data["runs"] = [{**row, "tau_without_prefill": 1.0} for row in plain] + [
        {**row, "strategy": name, "tau_without_prefill": tau}
        for name, tau in sizes.items() for row in own
    ]  # fmt: skip
    (adapter / "results.json").write_text(json.dumps(data))
    write_card(adapter, "org/skip", "org/base")
    card = (adapter / "README.md").read_text()
    assert "| mean | trees of 8 | 4 | 2.00 | 1.81 | 1.23x | 3 of 4 identical |" in card
    assert "| qa | chains of 3 | 4 | 1.50 | 1.81 |" in card
    found = [
        (one.metric_type, one.metric_value, one.metric_name, one.dataset_name)
        for one in ModelCard(card).data.eval_results
    ]
    said = "mean of 2 groups, at most 256 new tokens, greedy, bfloat16"
    assert found == [
        ("tau_without_prefill", 2.0, f"tau_without_prefill, trees of 8, {said}", "spec-bench"),
        ("tau", 1.812, f"tau, trees of 8, {said}", "spec-bench"),
        ("tau_without_prefill", 1.5, f"tau_without_prefill, chains of 3, {said}", "spec-bench"),
        ("tau", 1.812, f"tau, chains of 3, {said}", "spec-bench"),
    ]


@pytest.mark.parametrize(("seconds", "words"), [(62.0, " 1 minute on"), (140.0, " 2 minutes on")])
def test_a_card_counts_minutes(tmp_path, seconds, words):
    demo = Path(hf_spec.__file__).parent / "tools" / "demo"
    shutil.copytree(demo / "adapters" / "medusa", tmp_path, dirs_exist_ok=True)
    record = json.loads((tmp_path / "training.json").read_text())
    (tmp_path / "training.json").write_text(json.dumps({**record, "seconds": seconds}))
    card = render_card(tmp_path)
    assert words in card and "last_stats(model).tau" in card


def test_a_card_of_pefts_names_the_library_that_loads_it(checkpoint, tmp_path):
    model = get_peft_model(load_checkpoint(checkpoint), hf_spec.LayerSkipConfig(skip_attention=[1]))
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "hf_spec" and "PEFT" in card.text
    (tmp_path / "README.md").write_text("---\ntags: []\n---\nlibrary_name: peft\n")
    model.peft_config["default"].save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "---\ntags: []\n---\nlibrary_name: peft\n"


def test_what_a_card_says_of_other_measurements(adapter):
    # Several tasks have a row each. In Markdown, a line right after a table is one of its rows.
    (adapter / "results.json").write_text(json.dumps(results(tasks=("qa", "math"))))
    card = render_card(adapter)
    for task in ("qa", "math", "all"):
        assert f"| {task} | 4 | 50.0 | 61.7 |" in card
    assert not re.search(r"^\|.*\n[^|\n]", card, re.MULTILINE) and "\n\n\n" not in card
    # The prompts are those that the settings were searched on.
    search = {
        "environment": {"prompts_sha256": "ab12"}, "identity": {"prompts": 4},
        "trials": 7, "held_out": 0, "best": {"speedup": 0.9},
    }  # fmt: skip
    (adapter / "search.json").write_text(json.dumps(search))
    card = render_card(adapter)
    assert "the development prompts that the settings were searched on" in card
    assert "best of 7 trials over 4 prompts" in card
    assert "No choice was faster than plain decoding" in card
    # The acceptance rule may change the output.
    edit(adapter / "generation_config.json", assistant_kwargs={"acceptance": "typical"})
    card = render_card(adapter)
    assert "**Lossy.**" in card and "Lossless" not in card and 'acceptance="typical"' in card
    (adapter / "results.json").unlink()
    assert "Not measured yet" in render_card(adapter)


@pytest.mark.parametrize("text", ['{"runs": []}', json.dumps(results("medusa")), "{}"])
def test_card_with_results_of_something_else(adapter, text):
    (adapter / "results.json").write_text(text)
    with pytest.raises(ValueError, match="is not what hf-spec bench writes for 'layer_skip'"):
        render_card(adapter)


@pytest.mark.parametrize("template", [None, "chat: {{ messages[0].content }}"])
def test_the_cards_example_runs(adapter, monkeypatch, capsys, template):
    """Install line first, then code that starts with ``import hf_spec``; a model for chats is asked
    in its template."""
    load = AutoTokenizer.from_pretrained

    def loaded(*args: Any, **kwargs: Any) -> Any:
        tokenizer = load(*args, **kwargs)
        tokenizer.chat_template = template
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", loaded)
    card = (adapter / "README.md").read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", card, re.DOTALL)
    assert blocks[0] == ("bash", f"{INSTALL}\n")
    language, code = blocks[1]
    assert language == "python" and code.startswith("import hf_spec")
    monkeypatch.chdir(adapter.parent)  # the folder's name stands for the repository's
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {"__name__": "card"})
    *answer, last = capsys.readouterr().out.splitlines()
    assert float(last.split()[0]) >= 1.0
    assert ("chat: Explain" in "\n".join(answer)) == bool(template)


def test_hf_spec_card(adapter, capsys):
    (adapter / "README.md").unlink()
    shutil.rmtree(adapter / "custom_generate")
    assert cli.main(["card", str(adapter), "--repository", "org/skip"]) == 0
    assert "README.md" in capsys.readouterr().out
    assert 'model.load_adapter("org/skip")' in (adapter / "README.md").read_text()
    check_complete(adapter)
    assert cli.main(["card", str(adapter / "none")]) == 2
    error = capsys.readouterr().err
    assert "cannot read" in error and error.count("\n") == 1


# -- custom_generate -----------------------------------------------------------------------------


def test_custom_generate(adapter, checkpoint, decoded, tmp_path, monkeypatch):
    cache = str(tmp_path / "modules")  # Transformers copies remote code into a folder of its own
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.setattr(sys, "path", [cache, *sys.path])
    model = load_checkpoint(checkpoint)
    ids = torch.tensor([[9, 8, 7, 9, 8, 7]])
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(ids, **options)
    custom = {"custom_generate": str(adapter), "trust_remote_code": True, **options}
    with pytest.raises(ValueError, match="load a LAYER_SKIP adapter"):
        model.generate(ids, **custom)
    model.load_adapter(str(adapter))
    decoded.clear()
    assert torch.equal(model.generate(ids, **custom), plain)
    assert decoded == ["layer_skip"]
    assert max(hf_spec.last_stats(model).offered) == 3  # num_draft_tokens of the repository
    model.generate(ids, **custom, assistant_kwargs={"num_draft_tokens": 2})
    assert max(hf_spec.last_stats(model).offered) == 2
    # A call that names a strategy itself is left alone.
    model.generate(ids, **custom, assistant_strategy="prompt_lookup")
    config = hf_spec.SpecConfig(assistant_strategy="prompt_lookup", **options)
    model.generate(ids, **custom, generation_config=config)
    assert decoded == ["layer_skip"] * 2 + ["prompt_lookup"] * 2
    # As Transformers makes it when a model is loaded from a repository with custom_generate.
    ours = shim(adapter / "custom_generate" / "generate.py")["generate"]
    model.generate = functools.partial(ours, model=model)
    assert torch.equal(model.generate(inputs=ids, **options), plain)
    assert max(hf_spec.last_stats(model).offered) == 3


def shim(path: Path) -> dict[str, Any]:
    scope: dict[str, Any] = {"__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    return scope


def test_a_pushed_shim_names_its_repository(adapter):
    path = adapter / "custom_generate" / "generate.py"
    _, options = read_spec_config(adapter)  # in the order of the file
    path.write_text(shim_text("layer_skip", options, "LAYER_SKIP", "org/a-b.c_d"))
    made = shim(path)["SETTINGS"]
    assert (made["options"], made["repository"]) == (OPTIONS, "org/a-b.c_d")
    check_complete(adapter)  # as it comes back from the Hub
    path.write_text(path.read_text().replace("'org/a-b", "evil('org/a-b"))
    with pytest.raises(ValueError, match="does not say what generation_config.json says"):
        check_complete(adapter)


@pytest.mark.parametrize("loaded", [{}, {"default": "LORA"}, {"default": "LAYER_SKIP"}])
@pytest.mark.parametrize("commit", ["0123456789" * 4, "custom"])
def test_the_shim_loads_its_adapter(tmp_path, monkeypatch, loaded, commit):
    """Once, under a name that is free, at the commit that it came with itself."""
    monkeypatch.setattr(GenerationMixin, "generate", lambda model, **kwargs: kwargs)
    model = Mock(spec=["load_adapter"])
    load = model.load_adapter
    if loaded:
        model.peft_config = {k: SimpleNamespace(peft_type=v) for k, v in loaded.items()}
    path = tmp_path / commit / "custom_generate" / "generate.py"
    path.parent.mkdir(parents=True)
    path.write_text(shim_text("layer_skip", OPTIONS, "LAYER_SKIP", "org/skip"))
    scope = shim(path)
    scope["generate"](model, assistant_strategy="prompt_lookup")
    assert not load.called  # a call that names a strategy itself is left alone
    assert scope["generate"](model)["assistant_strategy"] == "layer_skip"
    if "LAYER_SKIP" in loaded.values():
        assert not load.called
        return
    name = "custom_generate" if loaded else "default"
    pinned = {"revision": commit} if commit != "custom" else {}
    load.assert_called_once_with("org/skip", adapter_name=name, adapter_kwargs=pinned)


# -- push ----------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The Hub, with the repository of an earlier adapter."""
    hub = create_autospec(HfApi, instance=True)
    hub.list_repo_files.return_value = [
        "training.json", "search.json", "results.json", "old.bin", "NOTES.md", "README.md"
    ]  # fmt: skip
    hub.create_commit.return_value.commit_url = "https://hub/commit/1"
    monkeypatch.setattr("hf_spec.tools.hub.HfApi", lambda: hub)
    return hub


def uploaded(hub: Mock) -> dict[str, bytes]:
    """The files of the latest commit."""
    files = {}
    for one in hub.create_commit.call_args.kwargs["operations"]:
        if isinstance(one, CommitOperationAdd):
            with one.as_file() as file:
                files[one.path_in_repo] = file.read()
    return files


def test_push(adapter, hub, capsys):
    (adapter / "study.jsonl").write_text("stays here")
    (adapter / "search.png").write_bytes(b"png")
    (adapter / "tau.svg").write_text("<svg/>")
    write_card(adapter)
    shutil.rmtree(adapter / "custom_generate")  # is rendered on the way
    before = {p: p.read_bytes() for p in adapter.rglob("*") if p.is_file()}
    more = ["--private", "--revision", "v2", "--base-model", "org/base"]
    assert cli.main(["push", str(adapter), "org/skip", *more]) == 0
    assert capsys.readouterr().out == "uploaded: https://hub/commit/1\n"
    assert hub.mock_calls[:-1] == [
        call.create_repo("org/skip", private=True, exist_ok=True),
        call.create_branch("org/skip", branch="v2", exist_ok=True),
        call.list_repo_files("org/skip", revision="v2"),
    ]
    given, files = hub.create_commit.call_args, uploaded(hub)
    assert given.args == ("org/skip",) and given.kwargs["revision"] == "v2"
    # What the earlier adapter has measured, and its pickles, are removed.
    deleted = {one.path_in_repo for one in given.kwargs["operations"]} - files.keys()
    assert deleted == {"training.json", "search.json", "old.bin"}
    assert set(files) == {
        "adapter_config.json", "adapter_model.safetensors", "generation_config.json", "README.md",
        "custom_generate/generate.py", "results.json", "search.png",
        "tau.svg",
    }  # fmt: skip
    assert b"'repository': 'org/skip'" in files["custom_generate/generate.py"]
    card = files["README.md"].decode()
    assert 'model.load_adapter("org/skip")' in card and "base_model: org/base" in card
    assert str(adapter.parent) not in card
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    assert {p: p.read_bytes() for p in adapter.rglob("*") if p.is_file()} == before


def test_what_is_uploaded_says_nothing_of_this_machine(adapter, checkpoint, hub):
    """Folders are left out wherever there are some, and the base has its public name."""
    home, base = str(adapter.parent), str(checkpoint)
    data = results()
    data["environment"] |= {
        "model": base, "prompts": f"{home}/dev prompts/test.jsonl", "dataset": None,
        "argv": [
            "hf-spec", "bench", "--prompts", "../mine/test.jsonl", f"--adapter={home}/a/b",
            "--strategy-kwargs", f'{{"adapter": "{home}/c"}}', "org/data/config", "http://x/y/z",
        ],
    }  # fmt: skip
    (adapter / "results.json").write_text(json.dumps(data))
    record = {"base_model": base, "data": {"provenance": {"model": base, "adapter": "~/my/heads"}}}
    (adapter / "search.json").write_text(json.dumps({"environment": data["environment"]}))
    (adapter / "training.json").write_text(json.dumps(record))
    (adapter / "README.md").write_text("# Mine")  # a card of ours needs more of a training
    push(adapter, "org/skip", base_model="org/base")
    files = uploaded(hub)
    assert not [name for name, text in files.items() if home.encode() in text]
    where = json.loads(files["results.json"])["environment"]
    assert where == json.loads(files["search.json"])["environment"]
    assert (where["model"], where["prompts"]) == ("org/base", "test.jsonl")
    assert where["argv"] == [
        "hf-spec", "bench", "--prompts", "test.jsonl", "--adapter=b",
        "--strategy-kwargs", '{"adapter": "c"}', "org/data/config", "http://x/y/z",
    ]  # fmt: skip
    assert json.loads(files["training.json"]) == {
        "base_model": "org/base",
        "data": {"provenance": {"model": "org/base", "adapter": "heads"}},
    }


def pushed_card(folder: Path, hub: Mock) -> str:
    push(folder, "org/skip", base_model="org/base")
    return uploaded(hub)["README.md"].decode()


def test_a_dry_run_shows_the_card_and_the_files(adapter, hub, capsys):
    before = {path: path.read_bytes() for path in adapter.rglob("*") if path.is_file()}
    words = ["push", str(adapter), "org/skip", "--base-model", "org/base", "--license", "mit"]
    assert cli.main([*words, "--dry-run"]) == 0
    assert not hub.mock_calls
    card, _, listed = capsys.readouterr().out.partition("\n--- files of one commit to org/skip ---")
    assert {p: p.read_bytes() for p in adapter.rglob("*") if p.is_file()} == before
    assert cli.main(words) == 0
    files = uploaded(hub)
    assert card.strip() == files["README.md"].decode().strip() and "license: mit\n" in card
    lines = [line.split() for line in listed.strip().splitlines()[:-1]]
    assert [line[-1] for line in lines] == sorted(files)
    assert int(lines[sorted(files).index("README.md")][0].replace(",", "")) == len(
        files["README.md"]
    )


def test_a_license_for_a_card_that_a_person_wrote(adapter, hub):
    (adapter / "README.md").write_text("# Mine")
    with pytest.raises(ValueError, match="was edited by hand .* write the license into it"):
        push(adapter, "org/skip", base_model="org/base", license="mit", language=[])
    assert not hub.mock_calls


@pytest.mark.parametrize("text", ["# Mine\n", "---\nlicense: mit\n---\n", ""])
def test_push_keeps_a_card_that_a_person_wrote(adapter, hub, text):
    (adapter / "README.md").write_text(text)
    assert pushed_card(adapter, hub) == text


def test_push_renews_the_card_of_a_folder_that_was_renamed(adapter, checkpoint, hub):
    """And measured since, and saved by PEFT once more; a license that a person added stays."""
    new = render_card(adapter, "org/skip", "org/base")
    card = adapter / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nlicense: mit\n", 1))
    folder = adapter.rename(adapter.parent / "other name")
    assert pushed_card(folder, hub) == new.replace(
        "\nmodel-index:", "\nlicense: mit\nmodel-index:", 1
    )
    model = PeftModel.from_pretrained(load_checkpoint(checkpoint), folder)
    before = (folder / "README.md").read_text()
    model.save_pretrained(folder)
    assert (folder / "README.md").read_text() != before
    (folder / "results.json").unlink()
    found = pushed_card(folder, hub)
    assert "Not measured yet" in found and str(checkpoint.parent) not in found
    assert "base_model: org/base\n" in found and "license: mit\n" in found


@pytest.mark.parametrize("folder", DEMO, ids=[folder.name for folder in DEMO])
def test_push_renews_the_cards_of_the_demo(hub, folder):
    assert (folder / "README.md").read_text() == render_card(folder)
    assert pushed_card(folder, hub) == render_card(folder, "org/skip", "org/base")


@pytest.mark.parametrize(
    ("name", "base", "message"),
    [
        *((name, "org/base", "is no repository|Repo id") for name in
          ("name", "a/b/c", "org/na me", "org/-x")),
        ("org/skip", None, r"which nobody else has: .* --base-model owner/name"),
        ("org/skip", "{checkpoint}", "which nobody else has"),
    ],
)  # fmt: skip
def test_push_to_or_from_a_bad_name(adapter, hub, checkpoint, name, base, message):
    with pytest.raises(ValueError, match=message):
        push(adapter, name, base_model=base and base.format(checkpoint=checkpoint))
    assert not hub.mock_calls


def refusal(status: int) -> HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError("x", response=response, server_message="out of order\nand more")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refusal(403), "out of order (is your token valid, and may it write there? 'hf auth lo"),
        (refusal(500), "out of order"),
        (HfHubHTTPError.__bases__[0]("Server disconnected."), "Server disconnected."),
        (RuntimeError("Error while uploading 'x'"), "Error while uploading 'x'"),
        (LocalTokenNotFoundError("No token: run `hf auth login`"), "No token: run `hf auth login`"),
    ],
)
def test_push_refused(adapter, hub, capsys, error, message):
    hub.create_commit.side_effect = error
    assert cli.main(["push", str(adapter), "org/skip", "--base-model", "org/base"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"hf-spec: cannot upload to 'org/skip': {message}")
    assert said.count("\n") == 1


# -- reading from the Hub ------------------------------------------------------------------------


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of ``org/skip`` in the cache of downloads; there is no network."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(cache))
    root = cache / "models--org--skip"
    (root / "refs").mkdir(parents=True)
    return root


@pytest.mark.parametrize("way", ["load_adapter", "PeftModel", "named"])
def test_a_push_while_an_adapter_is_loaded(adapter, checkpoint, downloaded, monkeypatch, way):
    """All files are of the commit that the first one is of."""
    for commit in ("1" * 40, "2" * 40):
        shutil.copytree(adapter, downloaded / "snapshots" / commit)
    (downloaded / "refs" / "main").write_text("1" * 40)
    found: list[Path] = []

    @functools.wraps(hf_hub_download)
    def download(*args: Any, **kwargs: Any) -> str:
        path = hf_hub_download(*args, **kwargs)
        found.append(Path(path).relative_to(downloaded / "snapshots"))
        (downloaded / "refs" / "main").write_text("2" * 40)
        return path

    for place in ("huggingface_hub", "peft.config", "peft.utils.save_and_load"):
        monkeypatch.setattr(f"{place}.hf_hub_download", download)
    model = load_checkpoint(checkpoint)
    if way == "PeftModel":
        PeftModel.from_pretrained(model, "org/skip")
    elif way == "load_adapter":
        model.load_adapter("org/skip")
    assert find_active(model, "LAYER_SKIP", "org/skip" if way == "named" else None) is not None
    assert {path.parts for path in found} == {
        ("1" * 40, "adapter_config.json"), ("1" * 40, "adapter_model.safetensors")
    }  # fmt: skip


def test_load_by_id_and_branch(adapter, checkpoint, downloaded):
    """Weights, config and options are of one commit, and the output is plain decoding's.

    The repository is in the cache of downloads, in two revisions; there is no network.
    """
    for name, commit, attention, draft in (("v1", "1" * 40, [1], 3), ("main", "2" * 40, [0], 5)):
        edit(adapter / "adapter_config.json", skip_attention=attention)
        options = {**OPTIONS, "num_draft_tokens": draft}
        save_spec_config(adapter, "layer_skip", options)
        text = shim_text("layer_skip", options, "LAYER_SKIP", "org/skip")
        (adapter / "custom_generate" / "generate.py").write_text(text)
        shutil.copytree(adapter, downloaded / "snapshots" / commit)
        (downloaded / "refs" / name).write_text(commit)
    options = {"max_new_tokens": 12, "do_sample": False}
    ids = torch.tensor([[9, 8, 7, 9, 8, 7]])
    plain = load_checkpoint(checkpoint).generate(ids, **options)
    for pinned, skipped, longest in (({}, [0], 5), ({"revision": "v1"}, [1], 3)):
        config = hf_spec.SpecConfig.from_pretrained("org/skip", **pinned)
        by_name = load_checkpoint(checkpoint)
        by_name.load_adapter("org/skip", adapter_kwargs=pinned)
        by_peft = PeftModel.from_pretrained(load_checkpoint(checkpoint), "org/skip", **pinned)
        for model in (by_name, by_peft):
            found = model.generate(input_ids=ids, **options, **configured(config))
            assert torch.equal(found, plain)
            assert find_active(model, "LAYER_SKIP").config.skip_attention == skipped
            assert max(hf_spec.last_stats(model).offered) == longest
