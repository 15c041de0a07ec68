"""Adapter repositories over HTTP: the real clients against a small Hub on loopback.

``HF_ENDPOINT`` is read when ``huggingface_hub`` is imported, so clients run in processes of their
own: this file, called with the name of one of ``CLIENTS``. A process start takes seconds; each
client therefore does many things and reports them, and the tests look at report and server.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hub_server import GITATTRIBUTES, Hub, LineDropped, Refusal, Repository
from running import configured
from tiny_checkpoint import make_model, save_checkpoint

ROOT = Path(__file__).parents[2]
IDS = [[9, 8, 7, 9, 8, 7, 9]]
GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
WRITER, READER = "hf_writer", "hf_reader"
#: The layers skipped and the longest draft of each adapter, by where it goes.
FIRST, SECOND, BRANCH = ([1], 3), ([0], 5), ([0, 1], 2)
REQUIRED = {
    "adapter_config.json", "adapter_model.safetensors", "generation_config.json", "README.md",
    "custom_generate/generate.py",
}  # fmt: skip


# -- clients: run in processes of their own --------------------------------------------------------


def toy() -> Any:
    """An adapter type with weights, registered with PEFT."""
    from hf_spec.adapters.config import SpecPeftConfig
    from hf_spec.adapters.layer import SpecAdapterLayer
    from hf_spec.adapters.tuner import register_type

    @dataclass
    class ToyConfig(SpecPeftConfig):
        type_name: ClassVar[str] = "TOY"
        num_masks: int = 3

    class ToyAdapter(SpecAdapterLayer):
        def build(self, config: Any, model: Any) -> dict[str, torch.Tensor]:
            return {"masks": torch.randn(config.num_masks, model.config.hidden_size)}

    register_type(ToyConfig, ToyAdapter)
    return ToyConfig


def push(*arguments: str) -> dict[str, Any]:
    """``hf-spec push``: its exit code and what it printed."""
    from hf_spec import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["push", *arguments])
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def publish(base: str, folders: dict[str, str]) -> dict[str, Any]:
    """Push a base model and adapters in all ways, good and bad."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_spec

    report: dict[str, Any] = {}
    AutoModelForCausalLM.from_pretrained(base).push_to_hub("org/base")
    AutoTokenizer.from_pretrained(base).push_to_hub("org/base")
    named = ("--base-model", "org/base")
    report["first"] = push(folders["first"], "org/skip", *named)
    report["second"] = push(folders["second"], "org/skip", *named)
    report["branch"] = push(folders["branch"], "org/skip", *named, "--revision", "v2")
    report["again"] = push(folders["second"], "org/skip", *named)
    report["private"] = push(folders["first"], "org/hidden", *named, "--private")

    def adapted(config: Any, name: str = "default") -> Any:
        torch.manual_seed(0)
        return get_peft_model(AutoModelForCausalLM.from_pretrained("org/base"), config, name)

    skip = hf_spec.LayerSkipConfig(skip_attention=[1])
    adapted(skip).push_to_hub("org/peft")
    adapted(hf_spec.LayerSkipConfig(skip_mlp=[0]), "mine").push_to_hub("org/named")
    model = adapted(toy()(num_masks=4))
    model.push_to_hub("org/toy")
    report["toy"] = model.base_model.model.spec_modules.type_toy.toy_masks["default"].tolist()

    for name in ("cut", "full", "gone"):
        report[name] = push(folders["second"], f"org/{name}", *named)
    report["stranger"] = push(folders["first"], "stranger/skip", *named)
    report["secret"] = push(folders["first"], "stranger/secret", *named)
    os.environ["HF_TOKEN"] = "hf_wrong"
    report["wrong token"] = push(folders["first"], "org/skip", *named)
    del os.environ["HF_TOKEN"]
    report["no token"] = push(folders["first"], "org/skip", *named)
    return report


def read(first: str) -> dict[str, Any]:
    """Load everything back, with an empty cache and without a token.

    Args:
        first: hash of the first commit to org/skip.
    """
    from huggingface_hub import hf_hub_download
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    import hf_spec
    from hf_spec.adapters.active import find_active

    ids = torch.tensor(IDS)

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained("org/base", dtype=torch.float32)

    def used(model: Any, kind: str = "LAYER_SKIP", **call: Any) -> dict[str, Any]:
        """What a model does that has an adapter, where every step drafts."""
        active = find_active(model, kind)
        assert active is not None
        result = {"skip_attention": active.config.skip_attention}
        result["output"] = model.generate(input_ids=ids, **call, **GREEDY).tolist()
        stats = hf_spec.last_stats(model)
        return {**result, "max_draft": max(stats.offered), "drafts": stats.num_draft_forwards}

    report: dict[str, Any] = {"plain": base().generate(ids, **GREEDY).tolist()}
    for name, revision in (("main", None), ("branch", "v2"), ("hash", first)):
        pinned = {} if revision is None else {"revision": revision}
        config = hf_spec.SpecConfig.from_pretrained("org/skip", **pinned)
        model = base()
        model.load_adapter("org/skip", adapter_kwargs=pinned)
        report[f"load_adapter {name}"] = used(model, **configured(config))
        model = PeftModel.from_pretrained(base(), "org/skip", **pinned)
        report[f"PeftModel {name}"] = used(model, **configured(config))
        model = AutoPeftModelForCausalLM.from_pretrained("org/skip", **pinned)
        report[f"AutoPeftModel {name}"] = used(model, **configured(config))
    model = base()
    model.generate(ids, custom_generate="org/skip", trust_remote_code=True, **GREEDY)
    custom: Any = {"trust_remote_code": True, "assistant_kwargs": {"fallback": False}}
    report["custom_generate"] = used(model, custom_generate="org/skip", **custom)

    model = base()
    model.load_adapter("org/peft")
    config = hf_spec.SpecConfig.from_pretrained("org/peft")
    report["peft"] = used(model, **configured(config))
    report["peft custom_generate"] = used(model, custom_generate="org/peft", **custom)
    model = base()
    model.load_adapter("org/named", adapter_kwargs={"subfolder": "mine"})
    config = hf_spec.SpecConfig.from_pretrained("org/named", subfolder="mine")
    report["named"] = used(model, **configured(config))

    toy()
    model = base()
    model.load_adapter("org/toy")
    active = find_active(model, "TOY")
    assert active is not None
    report["toy"] = active.weights()["masks"].tolist()

    for name in ("org/hidden", "org/none", "org/pickled"):
        for door in (lambda m, n: m.load_adapter(n), PeftModel.from_pretrained):
            model = base()
            try:
                door(model, name)
                error = "loaded"
            except (OSError, ValueError) as caught:
                error = str(caught)
            report.setdefault("errors", []).append([name, error, hasattr(model, "spec_modules")])

    card = Path(hf_hub_download("org/skip", "README.md")).read_text(encoding="utf-8")
    code = dict(re.findall(r"```(\w+)\n(.*?)```", card, re.DOTALL))["python"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "card"})
    report["card"] = {"code": code, "printed": printed.getvalue()}
    return report


def without_hf_spec() -> dict[str, Any]:
    """What ``custom_generate`` says where hf_spec is not installed."""
    sys.modules["hf_spec"] = None  # type: ignore[assignment]  # makes an import fail
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("org/base")
    ids = torch.tensor(IDS)
    try:
        model.generate(ids, custom_generate="org/skip", trust_remote_code=True, **GREEDY)
    except ImportError as error:
        said = str(error)
    return {"error": said, "plain": model.generate(ids, **GREEDY).tolist()}


CLIENTS = {"publish": publish, "read": read, "push": push, "without_hf_spec": without_hf_spec}


def start(hub: Hub, client: str, *arguments: Any, home: Path, token: str | None = None) -> Any:
    """Start a client of ``hub`` with a cache of its own."""
    foreign = ("HF_", "HUGGING", "TRANSFORMERS_")  # offline switches, tokens, other caches
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    environment |= {
        "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "*",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }  # fmt: skip
    if token is not None:
        environment["HF_TOKEN"] = token
    return subprocess.Popen(
        [sys.executable, __file__, client, *map(json.dumps, arguments)],
        env=environment, cwd=home, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: Any) -> Any:
    """What the client reports."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(CLIENTS[sys.argv[1]](*map(json.loads, sys.argv[2:]))))
    sys.exit()


# -- the server and what is pushed -----------------------------------------------------------------


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.tokens = {WRITER: ("org",), READER: ("someone",)}
        old = {".gitattributes": GITATTRIBUTES, "README.md": b"# Old", "learned.json": b"{}"}
        for name in ("org/cut", "org/full", "org/gone", "org/killed", "stranger/secret"):
            hub.repositories[name] = Repository(private=name == "stranger/secret")
            hub.repositories[name].commit("main", dict(old), "old")

        def fail(request: Any) -> None:
            if "/org/cut/" in request.path:
                raise LineDropped
            if "/org/full/" in request.path:
                raise Refusal(400, "Your storage is full.\nBuy more.")
            if "/org/gone/" in request.path:
                raise Refusal(404, "Repository not found", "RepoNotFound")

        hub.faults["commit"] = fail
        yield hub


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base") / "m")


def make_adapter(folder: Path, checkpoint: Path, skip: list[int], max_draft: int) -> Path:
    """A complete adapter folder with things in it that must stay where they are."""
    from transformers import AutoModelForCausalLM

    import hf_spec
    from hf_spec.hub.card import write_card
    from hf_spec.hub.folder import save_spec_config, save_weightless

    config = hf_spec.LayerSkipConfig(skip_attention=skip)
    save_weightless(AutoModelForCausalLM.from_pretrained(checkpoint), config, folder)
    save_spec_config(folder, "layer_skip", {"draft_exit": "fixed", "max_draft": max_draft})
    (folder / "layers.png").write_bytes(b"\x89PNG of " + folder.name.encode())
    write_card(folder)
    (folder / "study.db").write_bytes(b"trials")
    (folder / "search.log").write_text("tried this, tried that")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "optimizer.pt").write_bytes(b"moments")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    made = {
        name: make_adapter(root / name, checkpoint, *settings)
        for name, settings in (("first", FIRST), ("second", SECOND), ("branch", BRANCH))
    }
    # An earlier adapter's, gone with the second.
    (made["first"] / "learned.json").write_text('{"version": 1, "entries": []}')
    return {name: str(folder) for name, folder in made.items()}


@pytest.fixture(scope="module")
def published(
    hub: Hub, checkpoint: Path, folders: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:  # fmt: skip
    home = tmp_path_factory.mktemp("writer")
    report = finish(start(hub, "publish", str(checkpoint), folders, home=home, token=WRITER))
    assert hub.unknown == []
    uploads = [token for method, path, token in hub.log if method == "PUT"]
    assert len(uploads) >= 5 and set(uploads) == {None}  # no token leaves for the storage
    return report


@pytest.fixture(scope="module")
def first_commit(published: dict[str, Any]) -> str:
    return published["first"]["out"].strip().rpartition("/")[2]


@pytest.fixture(scope="module")
def loaded(hub: Hub, first_commit: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pickled = hub.repositories["org/pickled"] = Repository()
    files = dict(hub.files("org/toy"))
    files["adapter_model.bin"] = files.pop("adapter_model.safetensors")
    pickled.commit("main", files, "weights as a pickle")
    hub.log.clear()
    report = finish(start(hub, "read", first_commit, home=tmp_path_factory.mktemp("reader")))
    assert hub.unknown == []
    return report


def plain_output() -> list[list[int]]:
    return make_model().generate(torch.tensor(IDS), **GREEDY).tolist()


# -- pushing ---------------------------------------------------------------------------------------


def test_a_push_is_complete_and_nothing_more(
    hub: Hub, published: dict[str, Any], folders: dict[str, str], first_commit: str
) -> None:
    assert published["first"]["code"] == 0 and published["first"]["err"] == ""
    assert published["first"]["out"].startswith(f"uploaded: {hub.endpoint}/org/skip/commit/")
    files = hub.files("org/skip", first_commit)
    assert set(files) == REQUIRED | {"layers.png", "learned.json"}
    folder = Path(folders["first"])
    for name in ("adapter_model.safetensors", "generation_config.json", "layers.png"):
        assert files[name] == (folder / name).read_bytes()
    assert "REPOSITORY: str | None = 'org/skip'\n" in files["custom_generate/generate.py"].decode()
    config = json.loads(files["adapter_config.json"])
    assert config["base_model_name_or_path"] == "org/base"
    assert config["base_facts"]["num_hidden_layers"] == 2 and config["base_fingerprint"]
    card = files["README.md"].decode()
    assert 'load_adapter("org/skip")' in card and "base_model: org/base" in card
    assert str(folder.parent) not in card


def test_a_second_push_updates(hub: Hub, published: dict[str, Any], first_commit: str) -> None:
    assert published["second"]["code"] == 0
    files, before = hub.files("org/skip"), hub.files("org/skip", first_commit)
    assert set(files) == REQUIRED | {"layers.png"}  # the first adapter's tree is gone
    assert json.loads(files["adapter_config.json"])["skip_attention"] == SECOND[0]
    assert json.loads(before["adapter_config.json"])["skip_attention"] == FIRST[0]
    # One commit per push and branch; pushing the same again makes none.
    assert hub.repositories["org/skip"].messages == [
        "initial commit", *["Upload adapter with hf_spec"] * 3
    ]  # fmt: skip
    second = published["second"]["out"].strip().rpartition("/")[2]
    assert published["again"]["code"] == 0 and second in published["again"]["out"]


def test_a_push_to_a_branch(hub: Hub, published: dict[str, Any]) -> None:
    assert published["branch"]["code"] == 0
    files = hub.files("org/skip", "v2")
    assert json.loads(files["adapter_config.json"])["skip_attention"] == BRANCH[0]
    assert set(files) == REQUIRED | {"layers.png"}


def test_private_repositories(hub: Hub, published: dict[str, Any]) -> None:
    assert published["private"]["code"] == 0
    assert hub.repositories["org/hidden"].private and not hub.repositories["org/skip"].private


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no token", "cannot upload to 'org/skip': Invalid username or password. .*hf auth login"),
        ("wrong token", "cannot upload to 'org/skip': Invalid credentials .*hf auth login"),
        ("stranger", "'stranger/skip': You don't have the rights to create .*hf auth login"),
        ("secret", "'stranger/secret': You don't have the rights to create .*hf auth login"),
        ("gone", "cannot upload to 'org/gone': Repository not found"),
        ("full", "cannot upload to 'org/full': Your storage is full."),
        ("cut", "cannot upload to 'org/cut': Server disconnected without sending a response."),
    ],
)
def test_a_refused_push_says_so_in_one_line(
    hub: Hub, published: dict[str, Any], case: str, message: str
) -> None:
    result = published[case]
    assert result["code"] == 2 and result["out"] == ""
    assert re.match(f"hf-spec: .*{message}", result["err"]), result["err"]
    assert result["err"].count("\n") == 1
    if case in ("gone", "full", "cut", "secret"):
        name = "stranger/secret" if case == "secret" else f"org/{case}"
        assert hub.files(name) == {"README.md": b"# Old", "learned.json": b"{}"}
    assert "stranger/skip" not in hub.repositories


def test_a_killed_push_leaves_the_repository_as_it_was(
    hub: Hub, published: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """The process dies while a file is on its way."""
    folder = make_adapter(tmp_path / "killed", checkpoint, [1], 4)
    reached, release = threading.Event(), threading.Event()

    def wait(_: Any) -> None:
        reached.set()
        release.wait(60)
        raise LineDropped

    hub.faults["lfs_upload"] = wait
    arguments = (str(folder), "org/killed", "--base-model", "org/base")
    process = start(hub, "push", *arguments, home=tmp_path, token=WRITER)
    try:
        assert reached.wait(120)
    finally:
        process.kill()
        process.communicate()
        release.set()
        del hub.faults["lfs_upload"]
    assert hub.files("org/killed") == {"README.md": b"# Old", "learned.json": b"{}"}
    assert hub.repositories["org/killed"].messages == ["old"]


# -- PEFT's own push_to_hub ------------------------------------------------------------------------


def test_push_to_hub_of_peft_is_complete(hub: Hub, published: dict[str, Any]) -> None:
    """All but a card of ours: Transformers puts a general one into a new repository."""
    files = hub.files("org/peft")
    assert set(files) == REQUIRED
    config = json.loads(files["generation_config.json"])
    assert (config["assistant_strategy"], config["assistant_kwargs"]) == ("layer_skip", {})
    # An adapter with another name lies in a folder; custom_generate does not look there.
    named = hub.files("org/named")
    inside = {"adapter_config.json", "adapter_model.safetensors", "generation_config.json"}
    assert set(named) == {"README.md", *(f"mine/{name}" for name in inside)}
    # A type that no strategy has gets no strategy.
    assert set(hub.files("org/toy")) == {"README.md", *inside - {"generation_config.json"}}


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["load_adapter", "PeftModel", "AutoPeftModel"])
@pytest.mark.parametrize(
    ("revision", "settings"), [("main", SECOND), ("branch", BRANCH), ("hash", FIRST)]
)
def test_load_by_id_branch_and_hash(
    loaded: dict[str, Any], door: str, revision: str, settings: tuple[list[int], int]
) -> None:
    """Weights, config and options are of one commit, and the output is plain decoding's."""
    found = loaded[f"{door} {revision}"]
    assert (found["skip_attention"], found["max_draft"]) == settings
    assert found["output"] == loaded["plain"] == plain_output()
    assert found["drafts"] > 0


def test_custom_generate(loaded: dict[str, Any]) -> None:
    """The repository's code loads the adapter, and finds it at the second call."""
    found = loaded["custom_generate"]
    assert found["output"] == loaded["plain"]
    assert (found["skip_attention"], found["max_draft"]) == SECOND


def test_what_peft_pushed_works(loaded: dict[str, Any]) -> None:
    for name in ("peft", "peft custom_generate"):
        assert loaded[name]["output"] == loaded["plain"] and loaded[name]["drafts"] > 0
        assert loaded[name]["skip_attention"] == [1]
    assert loaded["named"]["output"] == loaded["plain"] and loaded["named"]["drafts"] > 0


def test_weights_arrive_bit_by_bit(loaded: dict[str, Any], published: dict[str, Any]) -> None:
    assert loaded["toy"] == published["toy"]
    assert torch.tensor(loaded["toy"]).shape == (4, 32)


def test_what_cannot_be_read(hub: Hub, loaded: dict[str, Any]) -> None:
    assert len(loaded["errors"]) == 6
    for name, error, attached in loaded["errors"]:
        assert error != "loaded" and not attached
        if name == "org/pickled":
            assert "'org/pickled' holds no adapter_model.safetensors" in error
            assert "never from a pickle" in error
    # It was not even downloaded.
    assert not [path for method, path, _ in hub.log if method == "GET" and ".bin" in path]


def test_readers_need_no_token(hub: Hub, loaded: dict[str, Any]) -> None:
    assert {token for _, _, token in hub.log} == {None}
    assert not [path for method, path, _ in hub.log if method not in ("GET", "HEAD")]


def test_the_example_of_the_card_runs(loaded: dict[str, Any]) -> None:
    card = loaded["card"]
    assert card["code"].startswith("import hf_spec") and '"org/skip"' in card["code"]
    assert re.search(r"^[1-9][\d.]* tokens per forward pass$", card["printed"], re.MULTILINE)


def test_custom_generate_without_hf_spec(
    hub: Hub, published: dict[str, Any], tmp_path: Path
) -> None:
    report = finish(start(hub, "without_hf_spec", home=tmp_path))
    assert "pip install hf_spec" in report["error"]
    assert report["plain"] == plain_output()
    assert hub.unknown == []
