"""What ``hf-spec tune`` saves beside an adapter, and what a new process makes of it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from running import drafting
from tiny_checkpoint import load_checkpoint, save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM

import hf_spec
from hf_spec import cli
from hf_spec.adapters.active import require_active
from hf_spec.core.memory import forget
from hf_spec.decoding.strategy import Strategy
from hf_spec.drafting.calibration import Calibration
from hf_spec.hub.folder import check_complete
from hf_spec.methods.registry import get_method
from hf_spec.policy import saved
from hf_spec.policy.learned import Learned

IDS = torch.tensor([[9, 8, 7, 9, 8, 7, 9, 8]])
NEW = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model ``m``, prompts ``p.jsonl``, and a PPD adapter ``a`` after ``hf-spec tune``."""
    root = tmp_path_factory.mktemp("tune")
    save_checkpoint(root / "m")
    rows = [{"prompt": text} for text in ("abab" * 4, "xyz xyz xyz", "one one one")]
    write_prompts(root / "p.jsonl", rows)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(root / "m", dtype=torch.float32)
    get_peft_model(model, hf_spec.PPDConfig(num_prompt_tokens=2)).save_pretrained(root / "a")
    assert tune(root, "--batch-size", "1,2") == 0
    return root


def tune(root: Path, *more: str) -> int:
    return cli.main(
        [
            "tune", "--model", str(root / "m"), "--adapter", str(root / "a"),
            "--prompts", str(root / "p.jsonl"), "--dtype", "float32", "--device", "cpu",
            "--max-new-tokens", "48", "--max-size", "12", *more,
        ]
    )  # fmt: skip


def load(root: Path) -> Any:
    model = load_checkpoint(root / "m")
    model.generation_config.eos_token_id = None
    model.load_adapter(root / "a")
    return model


def strategy(model: Any, **options: Any) -> Strategy:
    return Strategy.of(model, hf_spec.SpecConfig("ppd", options, do_sample=False))


def file_of(root: Path) -> Path:
    return root / "a" / "learned.json"


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    """A copy of `made`, to change."""
    (tmp_path / "m").symlink_to(made / "m")
    (tmp_path / "p.jsonl").symlink_to(made / "p.jsonl")
    (tmp_path / "a").mkdir()
    for path in (made / "a").iterdir():
        if path.is_file():
            (tmp_path / "a" / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_the_file(made: Path) -> None:
    data = json.loads(file_of(made).read_text())
    (entry,) = data["entries"]
    options = get_method("ppd").parse_options({})
    wanted = saved.conditions(load(made), "ppd", options)
    assert wanted.items() <= entry.items() and wanted["options"] == {}
    assert {one["batch_size"] for one in entry["settings"]} == {1, 2}
    for one in entry["settings"]:
        assert len(one["times"]["seconds"]) > 2 and one["times"]["drafting"] > 0
    assert all(len(values) == 2 for values in entry["calibration"].values())
    assert 3 <= entry["tree"]["size"] <= 12 or entry["tree"]["size"] == 2
    assert len(entry["tree"]["states"]) == 3
    assert [path.name for path in (made / "a").glob("*.tmp")] == []


def test_a_new_process_starts_from_it(made: Path) -> None:
    """Before the first step: step times of every setting, the calibration, and the tree."""
    model = load(made)
    (entry,) = json.loads(file_of(made).read_text())["entries"]
    found = strategy(model)
    assert found.learned.prediction_value == entry["prediction_value"]
    keys = [(one["batch_size"], one["context_bits"], "cpu") for one in entry["settings"]]
    assert sorted(found.learned.settings) == sorted(keys)
    for key, one in zip(keys, entry["settings"]):
        times = found.learned.settings[key].times
        assert times.means == {int(n): s for n, s in one["times"]["seconds"].items()}
        assert times.line is not None and times.drafting_seconds == one["times"]["drafting"]
        assert not found.learned.settings[key].tries  # nothing has to be tried first
    drafter: Any = found.drafter
    source = drafter.source
    assert source.calibrations[False].hits.tolist() == entry["calibration"]["hits"]
    assert source.calibrations[True].hits.tolist() == Calibration(2).hits.tolist()
    plain = model.generate(IDS, **NEW)
    for options in ({}, {"tree": "dynamic"}):
        assert torch.equal(model.generate(IDS, **NEW, **drafting("ppd", **options)), plain)
        assert hf_spec.last_stats(model).num_drafted_tokens > 0
    forget(model)
    assert strategy(model).learned.settings.keys() == set(keys)


def test_other_conditions_are_ignored(
    made: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(made)
    with caplog.at_level(logging.DEBUG, logger="hf_spec"):
        assert not strategy(model, max_depth=1).learned.settings
        monkeypatch.setattr(saved, "device_name", lambda device: "Some GPU")
        forget(model)
        assert not strategy(model).learned.settings
    assert "has no entry for" in caplog.text and "Some GPU" in caplog.text
    assert {record.levelname for record in caplog.records if "no entry" in record.message} == {
        "DEBUG"
    }


def test_the_same_conditions_replace_an_entry(own: Path) -> None:
    data = json.loads(file_of(own).read_text())
    other = {**data["entries"][0], "device": "Some GPU", "threads": None}
    file_of(own).write_text(json.dumps({**data, "entries": [*data["entries"], other]}))
    hf_spec.SpecConfig("ppd", {"tree": "dynamic"}).save_pretrained(own / "a")
    before = (own / "a" / "generation_config.json").read_text()
    assert tune(own, "--limit", "1") == 0
    devices = [one["device"] for one in json.loads(file_of(own).read_text())["entries"]]
    assert devices == ["Some GPU", data["entries"][0]["device"]]
    assert (own / "a" / "generation_config.json").read_text() == before


def test_strategies_without_a_tree_of_their_own(
    made: Path, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(made / "m", dtype=torch.float32)
    get_peft_model(model, hf_spec.LayerSkipConfig(skip_mlp=[1])).save_pretrained(own / "skip")
    assert tune(own, "--adapter", str(own / "skip"), "--limit", "1") == 0
    (entry,) = json.loads((own / "skip" / "learned.json").read_text())["entries"]
    assert entry["strategy"] == "layer_skip" and "tree" not in entry and entry["settings"]
    assert "saved: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--adapter", "/nowhere"], "there is no folder with adapter_model.safetensors"),
        (["--prompts", "/nowhere"], "cannot read '/nowhere': No such file"),
        (["--max-size", "1"], "--max-size"),
        (["--max-new-tokens", "4", "--limit", "1"], "too few steps to tell how long steps take"),
    ],
)
def test_bad_input_ends_in_one_line(
    own: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    before = file_of(own).read_text()
    assert tune(own, *more) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("hf-spec: ")
    assert file_of(own).read_text() == before


def test_interrupted(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before = file_of(own).read_text()
    monkeypatch.setattr("hf_spec.bench.session.Session.generate", interrupt)
    assert tune(own) == 130
    assert file_of(own).read_text() == before


def entry_with(**changes: Any) -> dict[str, Any]:
    times = {"seconds": {"1": 0.01, "8": 0.02}, "drafting": 0.001, "drafted": None}
    setting = {"batch_size": 1, "context_bits": 4, "times": times, "pruned": times}
    for name in ("seconds", "drafting"):
        if name in changes:
            setting["times"] = {**times, name: changes.pop(name)}
    for name in ("batch_size", "context_bits"):
        if name in changes:
            setting[name] = changes.pop(name)
    return {"prediction_value": 1.0, "settings": [setting], "calibration": {}, **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ({}, "missing 'version'"),
        ({"version": 9, "entries": []}, "version 9, this hf_spec reads 1"),
        ({"version": 1, "entries": [7]}, "not subscriptable"),
        (entry_with(prediction_value="much"), "prediction_value='much': must be a number"),
        (entry_with(batch_size=0), "batch_size=0: must be a whole number"),
        (entry_with(seconds={"4": float("nan")}), r"seconds\[4\]=nan: must be a number"),
        (entry_with(seconds={"0": 0.1}), "step tokens=0: must be a whole number"),
        (entry_with(calibration={"hits": [-1.0]}), "calibration.hits=-1.0: must be a number"),
        (entry_with(calibration={"other": [1.0]}), "calibration has no 'other'"),
    ],
)
def test_broken_files(own: Path, data: Any, message: str) -> None:
    """One line that names the file and says what to do; also before an upload."""
    if isinstance(data, dict) and "prediction_value" in data:
        data = {"version": 1, "entries": [data]}
    file_of(own).write_text(data if isinstance(data, str) else json.dumps(data))
    for action in (
        lambda: strategy(load(own)).learned,
        lambda: saved.write_entry(file_of(own), {}),
        lambda: check_complete(own / "a"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            action()
        assert str(file_of(own)) in str(caught.value) and "\n" not in str(caught.value)
        assert str(caught.value).count("Delete the file, and run hf-spec tune again") == 1


def test_what_is_saved_is_what_is_read() -> None:
    learned, calibration = Learned(prediction_value=0.7), Calibration(3)
    times = learned.setting((4, 6, "cpu")).times
    for rows in (1, 4, 9) * 6:
        times.observe(rows, 0.01 * rows, None if rows == 1 else 0.002)
    calibration.observe(2, 0.5, True)
    entry = json.loads(json.dumps(saved.to_entry(learned, calibration)))
    found = saved.Saved(entry).learned("cuda:0")
    assert found.prediction_value == 0.7 and [*found.settings] == [(4, 6, "cuda:0")]
    again = found.settings[4, 6, "cuda:0"].times
    assert again.means == pytest.approx(times.means) and again.line == pytest.approx(times.line)
    assert again.drafting_seconds == pytest.approx(times.drafting_seconds)
    # Fewer distances: the rest is left out; more: they begin anew.
    for depth in (2, 3, 5):
        other = saved.Saved(entry).calibration(depth)
        assert other.hits[:2].tolist() == calibration.hits[:2].tolist()
        assert len(other.hits) == depth


def test_an_adapter_in_memory_has_no_file(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made / "m", dtype=torch.float32)
    model.add_adapter(hf_spec.PPDConfig())
    adapter = require_active(model, "PPD", "ppd")
    assert saved.saved_for(adapter, model, get_method("ppd").parse_options({})) is None
    assert saved.saved_for(None, model, get_method("ppd").parse_options({})) is None
