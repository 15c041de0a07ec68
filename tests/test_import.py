"""``import hf_spec`` is cheap, can be repeated, and touches no generation without a strategy."""

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from conftest import STRATEGIES, Tiny, check_same, prompt, ragged
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import utils as generation_utils

import hf_spec
from hf_spec.modeling_patches import generation_mode

#: What only some commands need; each is imported where it is used.
HEAVY = {
    "IPython", "datasets", "gradio", "matplotlib", "optuna", "pandas", "pyarrow", "rich",
    "scipy", "sklearn", "sqlalchemy", "tensorflow", "typer", "wandb",
}  # fmt: skip


def imported_by(
    program: str, started: Callable[[str], subprocess.CompletedProcess[str]]
) -> set[str]:
    """What a program imports, in a process of its own."""
    result = started(
        "import json, sys\nbefore = {*sys.modules}\n"
        f"{program}\nprint(json.dumps(sorted({{*sys.modules}} - before)))"
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


def new_interpreter(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180
    )


def test_nothing_heavy_is_imported() -> None:
    """Heavy packages cannot be imported here: where one is None in sys.modules, that fails."""
    program = f"sys.modules.update(dict.fromkeys({sorted(HEAVY)}))\nimport hf_spec"
    new = imported_by(program, forks.run) - HEAVY
    # Nothing of ours beyond the loop and the methods either: no command line, no benchmark.
    parts = {name.split(".")[1] for name in new if name.startswith("hf_spec.")}
    assert "decoding" in parts and parts <= {
        "adapters", "cache", "core", "decoding", "draft", "files", "methods", "modeling_patches",
        "predict", "target", "threads",
    }  # fmt: skip
    tops = {name.partition(".")[0] for name in new} - set(sys.stdlib_module_names)
    known = {"hf_spec", "transformers", "peft", "torch"}
    assert tops <= known, "third-party packages that transformers and peft don't load"


def test_help_and_version_load_neither_torch_nor_transformers() -> None:
    """They answer at once: for every command, in one interpreter."""
    program = """
sys.argv[0] = "hf-spec"
from hf_spec.tools.cli import main
assert main(["--version"]) == main(["--help"]) == 0
from hf_spec.tools.cli.main import app
for command in app.registered_commands:
    assert main([command.name or command.callback.__name__, "--help"]) == 0
"""
    loaded = imported_by(program, new_interpreter)
    assert "typer" in loaded and not loaded & {"torch", "transformers", "peft", "numpy"}


@pytest.mark.parametrize(
    "words",
    [
        "card {}",
        "push {} org/name",
        "export {} --format sglang -o o",
        "bench --model m --adapter {}",
        "doctor --model m --adapter {}",
        "check {} --model m",
    ],
)
def test_what_a_json_file_refuses_loads_nothing(tmp_path: Path, words: str) -> None:
    program = f"""
sys.argv[0] = "hf-spec"
from hf_spec.tools.cli import main
assert main({words.format(tmp_path).split()!r}) == 2
"""
    loaded = imported_by(program, new_interpreter)
    assert "typer" in loaded and not loaded & {"torch", "transformers", "peft"}


def test_public_names() -> None:
    for name in hf_spec.__all__:
        assert getattr(hf_spec, name) is not None
    assert {"SpecConfig", "SpecStats", "TokenTree", "LayerSkipConfig"} <= {*hf_spec.__all__}
    for name in ("nothing", "__nothing__"):
        with pytest.raises(AttributeError, match=f"module 'hf_spec' has no attribute '{name}'"):
            getattr(hf_spec, name)
    assert set(hf_spec.__all__) < set(dir(hf_spec))


def test_a_newer_minor_version_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warned(version: str) -> str:
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        generation_mode.warn_of_newer.cache_clear()
        caplog.clear()
        importlib.reload(hf_spec)
        importlib.reload(hf_spec)
        return "; ".join(record.getMessage() for record in caplog.records)

    tested = generation_mode.NEWEST_TESTED["transformers"]
    newer = f"{tested[:2]}{int(tested[2:]) + 1}"
    for version in (f"{tested}.0", f"{tested}.7", "5.9.1"):
        assert warned(version) == ""
    for version in (f"{newer}.0", f"{newer}.0.dev0", "6.0.0rc1"):
        text = warned(version)
        assert text.startswith(f"hf_spec is tested up to transformers {tested}; this is {version}:")
        assert text.count("tested up to") == 1


def test_the_newest_tested_versions_are_those_of_the_constraints() -> None:
    lines = (Path(__file__).parent.parent / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for name, tested in generation_mode.NEWEST_TESTED.items():
        assert pinned[name].rpartition(".")[0] == tested


def test_import_is_idempotent(tiny: Tiny) -> None:
    def state() -> tuple:
        return (
            GenerationConfig.__init__,
            GenerationConfig.from_pretrained.__func__,
            GenerationConfig.get_generation_mode,
            GenerationMixin._hf_spec_decode,
            GenerationMixin._validate_generation_mode,
            GenerationMixin.generate_batch,
            GenerationMixin.init_continuous_batching,
            dict(generation_utils.GENERATION_MODES_MAPPING),
        )

    before, finders = state(), [*sys.meta_path]
    module = importlib.reload(hf_spec)
    assert module is hf_spec
    assert state() == before and sys.meta_path == finders
    check_same(tiny(), STRATEGIES["prompt_lookup"], prompt())


DROPPED = """
import functools, sys, torch, peft, hf_spec
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import GENERATION_MODES_MAPPING

def wrapped():
    function, count = GenerationMixin.generate, 0
    while hasattr(function, "__wrapped__"):
        function, count = function.__wrapped__, count + 1
    return count

def check(model, found):
    settings = {"max_new_tokens": 8, "do_sample": False}
    plain = model.generate(ids, **settings)
    for name in ("medusa", "prompt_lookup"):
        out = model.generate(ids, assistant_strategy=name, **settings)
        assert out.tolist() == plain.tolist() and hf_spec.last_stats(model).strategy == name
    config = peft.PeftConfig.from_pretrained(folder)
    assert type(config) is hf_spec.MedusaConfig
    assert wrapped() == found and len(GENERATION_MODES_MAPPING) == modes

ids = torch.tensor([[3, 4, 5, 6, 3, 4, 5]])
torch.manual_seed(0)
shape = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, eos_token_id=None, pad_token_id=0)
model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
peft.get_peft_model(model, hf_spec.MedusaConfig(num_heads=2)).save_pretrained(folder)
modes, layers = len(GENERATION_MODES_MAPPING), wrapped()
check(model, layers)
for other in (False, True):
    if other:  # another library wraps generate() meanwhile
        stock = GenerationMixin.generate
        GenerationMixin.generate = functools.wraps(stock)(lambda *a, **k: stock(*a, **k))
    for name in [name for name in sys.modules if name.partition(".")[0] == "hf_spec"]:
        del sys.modules[name]
    before = hf_spec
    import hf_spec
    assert hf_spec is not before
    check(model, layers + other)
    fresh = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    fresh.load_adapter(folder)
    check(fresh, layers + other)
    assert type(fresh.peft_config["default"]) is hf_spec.MedusaConfig
product = torch.ops.hf_spec.packed_linear(torch.ones(1, 2), [torch.ones(3, 2)], []).tolist()
assert product == [[2.0] * 3]
from hf_spec.target import packed_weights
packed_weights.packed_linear = lambda *_: torch.zeros(1, 3)
product = torch.ops.hf_spec.packed_linear(torch.ones(1, 2), [torch.ones(3, 2)], []).tolist()
assert product == [[0.0] * 3], "the newest module has the packed copies"
"""


def test_modules_that_are_dropped_and_imported_again(tmp_path: Path) -> None:
    """As in notebooks: the newest modules serve the models there are, and new ones; nothing is
    registered twice."""
    result = forks.run(f"folder = {str(tmp_path)!r}\n{DROPPED}")
    assert result.returncode == 0, result.stderr


def test_generation_without_a_strategy_is_stock(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes through stock ``_sample`` and never comes near our loop."""

    def fail(*_: object, **__: object) -> None:
        pytest.fail("a call without a strategy reached hf_spec")

    monkeypatch.setattr(GenerationMixin, "_hf_spec_decode", fail)
    stock, calls = GenerationMixin._sample, []

    def sample(self: GenerationMixin, *args: object, **kwargs: object) -> object:
        calls.append(1)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_sample", sample)
    model = tiny()
    for kwargs in ({}, {"do_sample": True, "top_k": 5}, {"assistant_strategy": None}):
        model.generate(prompt(), max_new_tokens=4, **kwargs)
    model.generate(prompt(), generation_config=GenerationConfig(max_new_tokens=4))
    assert len(calls) == 4
    # Other modes are untouched, too.
    model.generate(prompt(), max_new_tokens=4, num_beams=2)
    model.generate(prompt(), max_new_tokens=4, prompt_lookup_num_tokens=2)
    assert len(calls) == 4


@pytest.mark.environment
def test_plain_results_do_not_depend_on_the_import(tiny: Tiny, tmp_path: object) -> None:
    """The same ids, greedy and sampled, in a process that has never heard of hf_spec."""
    model = tiny()
    model.save_pretrained(tmp_path)
    rows = {key: value.tolist() for key, value in ragged().items()}
    program = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
batch = {{key: torch.tensor(value) for key, value in {rows!r}.items()}}
torch.manual_seed(0)
print(model.generate(**batch, max_new_tokens=8, do_sample=False).tolist())
print(model.generate(**batch, max_new_tokens=8, do_sample=True).tolist())
assert "hf_spec" not in sys.modules
"""
    result = forks.run(program)
    assert result.returncode == 0, result.stderr
    torch.manual_seed(0)
    settings = {"max_new_tokens": 8}
    expected = [
        model.generate(**ragged(), **settings, do_sample=sampled).tolist()
        for sampled in (False, True)
    ]
    assert [json.loads(line) for line in result.stdout.splitlines()[-2:]] == expected


def public_functions() -> Iterator[tuple[str, Any]]:
    """The functions and methods behind public names, as far as they are ours."""
    for name in hf_spec.__all__:
        value = getattr(hf_spec, name)
        members = vars(value).items() if inspect.isclass(value) else [("", value)]
        for member, inside in members:
            function = getattr(inside, "__func__", getattr(inside, "fget", inside))
            ours = getattr(function, "__module__", "").startswith("hf_spec")
            hidden = member.startswith("_") and member != "__init__"
            if inspect.isfunction(function) and ours and not hidden:
                yield f"{name}.{member}".rstrip("."), function


def test_public_signatures_name_types() -> None:
    """A type where one can be given: not ``Any`` for a parameter or a result."""
    found = dict(public_functions())
    assert len(found) > 30
    # Those of Transformers' own method.
    overridden = {"SpecConfig.from_pretrained", "SpecConfig.from_dict"}
    for name in found.keys() - overridden:
        signature = inspect.signature(found[name])
        given = {
            one.name: one.annotation for one in signature.parameters.values()
            if one.name not in ("self", "cls") and one.kind != one.VAR_KEYWORD
        }  # fmt: skip
        made = signature.return_annotation
        for place, annotation in {**given, "result": made}.items():
            known = annotation is not inspect.Parameter.empty or place == "result"
            assert known and annotation not in (Any, "Any"), f"{name}: {place}"


def test_a_config_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for name in ("./nodir", str(tmp_path / "nodir")):
        with pytest.raises(OSError, match="there is no such folder$"):
            hf_spec.SpecConfig.from_pretrained(name)
    with pytest.raises(OSError, match="'nodir': there is no such folder here, and on the Hub: "):
        hf_spec.SpecConfig.from_pretrained("nodir", local_files_only=True)
    with pytest.raises(OSError, match=r"generation_config\.json"):
        hf_spec.SpecConfig.from_pretrained(tmp_path)
