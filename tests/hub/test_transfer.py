"""Published checkpoints in, other programs' files out."""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_same
from covering import covering
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from running import configured
from safetensors.torch import load_file, save_file
from tiny_checkpoint import load_checkpoint

import hf_spec
from hf_spec.adapters.loading import find_active
from hf_spec.tools import cli
from hf_spec.tools.hub import check_complete
from hf_spec.tools.loading import read_adapters
from hf_spec.tools.transfer import FILES, find_published, import_adapter, importable, read_published

HEADS, HIDDEN, VOCAB = 3, 32, 260
WANTS = importable("medusa")[1].wants
State = dict[str, torch.Tensor]
#: Names of a block's weight or bias and of a head's own projection.
LAYOUTS = {
    "alone": ("{head}.{at}.linear.{part}", "{head}.{at}.weight"),
    "in a model": ("medusa_head.{head}.{at}.linear.{part}", "medusa_head.{head}.{at}.weight"),
    "medusa_heads": ("medusa_heads.{head}.{at}.linear.{part}", "medusa_heads.{head}.{at}.weight"),
    "ddp": ("module.{head}.{at}.linear.{part}", "module.{head}.{at}.weight"),
    "vllm": ("blocks.{head}.layers.{at}.{part}", "lm_heads.{head}.weight"),
    "tensorrt_llm": (
        "medusa_heads.{head}.medusa_layers.{at}.linear.{part}", "medusa_heads.{head}.lm_head.weight"
    ),
}  # fmt: skip


def medusa_heads(layers: int = 1, own: bool = True, layout: str = "alone") -> State:
    """Heads of Medusa with own projections (version 1) or without (2)."""
    torch.manual_seed(0)
    block, projection = LAYOUTS[layout]
    state: State = {}
    for head in range(HEADS):
        for at in range(layers):
            name = partial(block.format, head=head, at=at)
            state[name(part="weight")] = torch.randn(HIDDEN, HIDDEN)
            state[name(part="bias")] = torch.randn(HIDDEN)
        if own:
            state[projection.format(head=head, at=layers)] = torch.randn(VOCAB, HIDDEN)
    return state


def write(state: State, path: Path) -> Path:
    torch.save(state, path) if path.suffix == ".pt" else save_file(state, path)
    return path


#: The adapter's tensors of a head, by the names of its parts in the layout ``alone``.
STACKED = {"linear.weight": "weights", "linear.bias": "biases", "weight": "projections"}


@pytest.mark.parametrize(
    ("suffix", "layers", "own", "layout"),
    covering(product((".pt", ".safetensors"), (1, 2), (True, False), LAYOUTS)),
)
def test_published_layouts(checkpoint, tmp_path, suffix, layers, own, layout):
    state = {name: t.half() for name, t in medusa_heads(layers, own, layout).items()}
    if layout == "in a model":
        state |= {"lm_head.weight": torch.ones(2), "model.layers.0.up_proj.weight": torch.ones(2)}
    path = write(state, tmp_path / f"medusa_lm_head{suffix}")

    model = load_checkpoint(checkpoint)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    output = import_adapter(path, "medusa", model, tmp_path / "adapter", {"tree": "chain"})
    check_complete(output)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.requires_grad
    stored = load_file(output / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}  # as it was published

    config = hf_spec.SpecConfig.from_pretrained(output)
    assert config.assistant_strategy == "medusa" and config.assistant_kwargs == {"tree": "chain"}
    model.load_adapter(str(output))
    adapter = find_active(model, "MEDUSA")
    assert (adapter.config.num_heads, adapter.config.num_layers) == (HEADS, layers)
    assert adapter.config.projection == ("own" if own else "shared")
    found = adapter.tensors()
    for name, tensor in medusa_heads(layers, own).items():
        head, at, part = name.split(".", 2)
        of_head = found[STACKED[part]][int(head)]
        ours = of_head if part == "weight" else of_head[int(at)]
        assert torch.equal(ours, tensor.half().float())
    check_same(model, configured(config), torch.tensor([[5, 9, 17, 40]]))


def test_shards_named_by_an_index(tmp_path):
    """Only the files that hold heads are read."""
    state = medusa_heads(layout="in a model")
    places = {name: f"part-{2 + place // 4}.bin" for place, name in enumerate(sorted(state))}
    for file in {*places.values()}:
        torch.save({name: state[name] for name in state if places[name] == file}, tmp_path / file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "absent.bin", **places}}))
    assert read_published(index, WANTS).keys() == state.keys()
    outside = {"weight_map": dict.fromkeys(state, "../part-2.bin")}
    for content, message in ((outside, "no file beside it"), ({}, "no weight_map")):
        index.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            read_published(index, WANTS)


@pytest.mark.parametrize("wrap", [
    lambda state: {"state_dict": state, "epoch": 3}, lambda state: {"model": {"module": state}},
])  # fmt: skip
def test_tensors_under_a_key(tmp_path, wrap):
    """As training programs save them, beside their own state."""
    torch.save(wrap(medusa_heads()), tmp_path / "x.pt")
    assert read_published(tmp_path / "x.pt", WANTS).keys() == medusa_heads().keys()


def test_a_folder(tmp_path):
    state = medusa_heads()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has none of medusa_lm_head.safetensors, "):
        find_published(str(tmp_path), WANTS)
    for name in ("model.safetensors", "medusa_lm_head.pt", "medusa_lm_head.safetensors"):
        path = write(state, tmp_path / name)
        assert find_published(str(tmp_path), WANTS) == path
        assert find_published(str(path), WANTS) == path
        assert read_published(path, WANTS).keys() == state.keys()


def test_the_hub_that_cannot_be_reached_is_asked_once(tmp_path, monkeypatch):
    """As it is asked several times each time, which takes half a minute; nothing is logged."""
    asked = []

    def download(place: str, name: str, local_files_only: bool = False, **_: Any) -> str:
        asked.append(local_files_only)
        raise LocalEntryNotFoundError("no network")

    for module in ("huggingface_hub", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.hf_hub_download", download)
    hub_logging.set_verbosity_warning()
    with pytest.raises(ValueError, match="in the local cache, and the Hub cannot be reached"):
        find_published("org/heads", WANTS)
    assert asked == [False] + [True] * (len(FILES) - 1)
    assert hub_logging.get_verbosity() == hub_logging.ERROR
    hub_logging.set_verbosity_warning()
    with pytest.raises(ValueError, match="cannot read adapter 'org/heads'"):
        read_adapters(["org/heads"])
    assert hub_logging.get_verbosity() == hub_logging.ERROR


def test_a_repository_without_the_hub(tmp_path, monkeypatch):
    """What was downloaded before is found offline: a single file, or an index and its shards."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    state, commit = medusa_heads(), "0" * 40
    for name in ("heads", "shards"):
        root = tmp_path / f"models--org--{name}"
        (root / "snapshots" / commit).mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(commit)
    torch.save(state, tmp_path / f"models--org--heads/snapshots/{commit}/medusa_lm_head.pt")
    found = find_published("org/heads", WANTS)
    assert read_published(found, WANTS).keys() == state.keys()
    folder = tmp_path / f"models--org--shards/snapshots/{commit}"
    places = dict.fromkeys(state, "model-2.safetensors") | {"lm_head.weight": "model-1.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match="'org/shards' has none of medusa_.* in the local cache"):
        find_published("org/shards", WANTS)
    save_file(state, folder / "model-2.safetensors")
    found = find_published("org/shards", WANTS)
    assert read_published(found, WANTS).keys() == state.keys()
    with pytest.raises(ValueError, match="'org/absent' has none of .* the Hub cannot be reached"):
        find_published("org/absent", WANTS)
    with pytest.raises(ValueError, match="there is no file 'org/heads.pt', nor a folder"):
        find_published("org/heads.pt", WANTS)


class Code:
    """Unpickled, it writes a file."""

    path = ""

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def test_code_in_a_pickle_does_not_run(tmp_path):
    Code.path = str(tmp_path / "written")
    torch.save({"0.0.linear.weight": torch.zeros(1), "x": Code()}, tmp_path / "heads.pt")
    with pytest.raises(ValueError, match="could run code"):
        read_published(tmp_path / "heads.pt", lambda name: True)
    assert not (tmp_path / "written").exists()
    torch.load(tmp_path / "heads.pt", weights_only=False)
    assert (tmp_path / "written").exists()  # it would have


def renamed(name: str) -> Any:
    return lambda state: state.update({name: state["0.0.linear.weight"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.clear(), "cannot import '.*heads.pt': it holds no heads"),
        (lambda s: s.pop("1.0.linear.weight"), "head 1, block 0 has no block"),
        (lambda s: s.pop("1.0.linear.bias"), "head 1, block 0 has no bias"),
        (lambda s: s.pop("1.1.weight"), "head 1 has no projection"),
        (lambda s: s.update({"7.1.weight": s["0.1.weight"]}), "projection of head 7"),
        (lambda s: s.update({"0.2.weight": s.pop("0.1.weight")}), "behind 2 blocks, but 1"),
        (lambda s: s.update({"0.0.linear.bias": torch.zeros(3)}), r"shape \(3,\), expected"),
        (lambda s: s.update({"0.1.weight": torch.zeros(9, 9)}), r"shape \(9, 9\)"),
        (lambda s: s.update({"medusa_head.0.1.weight": torch.zeros(1)}), "there twice"),
        (lambda s: s.update({"0.1.weight": torch.zeros(2, dtype=torch.int8)}), "torch.int8"),
        (renamed("999999999.0.linear.weight"), "'999999999.0.linear.weight': at most 256 heads"),
        (renamed(f"{'9' * 5000}.1.weight"), "'9{80}': at most 256 heads of 64 blocks"),
        (lambda s: s["1.0.linear.weight"].fill_(torch.nan), "'weights' of the checkpoint .*heads"),
        (lambda s: s.clear() or s.update({"0.0.linear.weight": torch.zeros(16, 16)}),
         r"does not fit LlamaForCausalLM.*16, 16.*32, 32"),
    ],
)  # fmt: skip
def test_files_that_hold_no_whole_heads(checkpoint, tmp_path, change, message):
    state, model = medusa_heads(), load_checkpoint(checkpoint)
    change(state)
    path = write(state, tmp_path / "heads.pt")
    with pytest.raises(ValueError, match=message):
        import_adapter(path, "medusa", model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not hasattr(model, "peft_config") and not hasattr(model, "spec_modules")


def command(*arguments: Any) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_import_and_export_commands(checkpoint, tmp_path, capsys):
    write(medusa_heads(), tmp_path / "heads.pt")
    assert not command(
        "import", tmp_path / "heads.pt", "--type", "medusa", "--model", checkpoint,
        "--output", tmp_path / "adapter", "--strategy-kwargs", '{"max_depth": 2}',
    )  # fmt: skip
    check_complete(tmp_path / "adapter")
    options = hf_spec.SpecConfig.from_pretrained(tmp_path / "adapter").assistant_kwargs
    assert options == {"max_depth": 2}
    capsys.readouterr()
    export = ("export", tmp_path / "adapter", "--output", tmp_path / "out", "--format", "sglang")
    assert command(*export) == 2
    assert "adapters of 'medusa' cannot be exported" in capsys.readouterr().err


def test_a_file_that_is_no_checkpoint(tmp_path):
    for name in ("heads.pt", "heads.safetensors"):
        whole = write(medusa_heads(), tmp_path / name).read_bytes()
        for content in (b"no tensors at all", whole[:200], whole[:-5]):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match="is no .*file") as caught:
                read_published(tmp_path / name, lambda name: True)
            assert "\n" not in str(caught.value)
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list"):
        read_published(tmp_path / "list.pt", lambda name: True)
