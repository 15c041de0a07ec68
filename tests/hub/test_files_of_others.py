"""Files that others have written, damaged at random: a ValueError or OSError in a line that names
the file, or they are read."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_oracle import saved
from released import Files, read, write
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hf_spec
from hf_spec.files import read_json
from hf_spec.tools.data import example
from hf_spec.tools.data import read as read_rows
from hf_spec.tools.hub import check_complete, render_card, save_spec_config
from hf_spec.tools.transfer import import_adapter, recognized

DRAFTERS = Path(__file__).parents[1] / "fixtures" / "drafters"
#: Released drafters, and what imports them.
RELEASED = {
    "eagle3/tiny-llama": "eagle3", "eagle3/peagle-tiny-llama": "eagle3",
    "block_diffusion/dflash2/tiny-llama/drafter": "dflash",
    "block_diffusion/domino/tiny-llama-shift/drafter": "dflash",
    "block_diffusion/dspark/tiny-llama-gated/drafter": "dspark",
}  # fmt: skip
#: Files each, of each kind.
COUNT = 24
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
JUNK: list[Any] = [
    None, True, -1, 0, 1, 3, 10**30, 1e300, float("nan"), float("inf"), "", "x", [], {}, [0], [-1],
    [10**30], ["x"], [[1]], {"x": 1}, {"rope_type": "yarn"}, {"rope_type": "yarn", "rope_theta": 1},
    {"rope_type": "longrope", "rope_theta": 1e4}, {"rope_type": "llama3", "rope_theta": 1e4}, DEEP,
    "9" * 5000,
]  # fmt: skip


def damaged(config: Any, rng: random.Random) -> Any:
    """A copy of what JSON holds, with something else at one or two places, or nothing."""
    config = copy.deepcopy(config)
    for _ in range(rng.choice((1, 1, 2))):
        places = list(_places(config))
        if not places:
            return rng.choice(JUNK)
        owner, key = rng.choice(places)
        if isinstance(owner, dict) and rng.random() < 0.2:
            del owner[key]
        else:
            owner[key] = rng.choice(JUNK)
    return config


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in list(inner):
        yield value, key
        if isinstance(one, (dict, list)) and one is not DEEP:
            yield from _places(one)


def damaged_tensor(tensor: Tensor, rng: random.Random) -> Tensor:
    return rng.choice([
        lambda: tensor.flatten()[0].clone(), lambda: tensor[:0].clone(), lambda: tensor[None],
        lambda: tensor[:-1].clone(), lambda: tensor.to(torch.int64), lambda: tensor.flatten(),
        lambda: torch.zeros(()), lambda: torch.full_like(tensor, torch.iinfo(torch.int8).max),
        lambda: tensor.bool(),
    ])()  # fmt: skip


def attempt(name: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether it works; if not, the error names the file."""
    try:
        work(*args, **kwargs)
    except (ValueError, OSError) as error:
        assert name in str(error) and "\n" not in str(error), error
        return False
    return True


@cache
def base() -> Any:
    """Of the shape that the drafters are for."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=8,
        num_attention_heads=2, num_key_value_heads=1,
    )).eval()  # fmt: skip


@pytest.mark.parametrize("place", RELEASED)
def test_released_drafters(tmp_path: Path, place: str) -> None:
    files, rng, read_ones = read(DRAFTERS / place), random.Random(place), 0
    for number in range(COUNT):
        config, tensors = files[0], dict(files[1])
        if number % 2:
            config = damaged(config, rng)
        else:
            name = rng.choice(sorted(tensors))
            tensors[name] = damaged_tensor(tensors[name], rng)
        made: Files = (config, tensors)
        path = write(tmp_path / str(number), made)
        attempt(str(path.parent), recognized, str(path.parent))
        given = path, RELEASED[place], base(), tmp_path / "adapter"
        read_ones += attempt(str(path.parent), import_adapter, *given)
    assert 0 < read_ones < COUNT / 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from conftest import shared

    made = tmp_path_factory.mktemp("made")
    model = copy.deepcopy(shared("llama"))
    config = hf_spec.Eagle3Config(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    saved(model, config, made)
    save_spec_config(made, "eagle3", {"width": 4})
    return made


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        if file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    return target


def test_adapter_folders(fresh: Any, tmp_path: Path, folder: Path) -> None:
    """Its config, and the strategy beside it."""
    rng, model = random.Random(7), fresh("llama")
    ids, call = torch.arange(3, 9)[None], {"max_new_tokens": 2, "assistant_strategy": "auto"}
    for number in range(2 * COUNT):
        own = copied(folder, tmp_path / str(number))
        name = ("adapter_config.json", "generation_config.json")[number % 2]
        data = json.loads((folder / name).read_text())
        (own / name).write_text(json.dumps(damaged(data, rng)))
        where = str(own)
        for work in (hf_spec.SpecConfig.from_pretrained, render_card, check_complete):
            attempt(where, work, own)
        if number % 2 == 0:
            attempt("", fresh("llama").load_adapter, where)  # the model's rules name fields
            given = {"adapter": where, "drafting": "always"}
            attempt("", model.generate, ids, **call, assistant_kwargs=given)


RECORDS = {
    "training.json": {"best": {"tau": 2.0, "eval_top1_1": 0.5}, "steps": 3, "seconds": 4.0},
    "results.json": {"environment": {"prompts_sha256": "x"}, "runs": [
        {"strategy": name, "task": "all", "batch_size": 1, "tokens_per_second": 2.0,
         "baseline": "plain", "speedup": 1.0, "tau": 2.0, "prompts": 1, "identical": 1}
        for name in ("plain", "eagle3")
    ]},
}  # fmt: skip


def test_records(tmp_path: Path, folder: Path) -> None:
    """What was measured of an adapter, which cards show."""
    rng = random.Random(8)
    for number in range(2 * COUNT):
        name = list(RECORDS)[number % 2]
        own = copied(folder, tmp_path / str(number))
        (own / name).write_text(json.dumps(damaged(RECORDS[name], rng)))
        attempt(str(own), render_card, own)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, '{"a": ' + "[" * 500 + "]" * 500 + "}"]
)
def test_nested_and_huge_json(fresh: Any, tmp_path: Path, folder: Path, text: str) -> None:
    """In every file that is read, one line with its name."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "x"}\n' + text)
    with pytest.raises(ValueError, match=r"data.jsonl, line 2: "):
        list(read_rows(tmp_path / "data.jsonl", example))
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(ValueError, match="one.json"):
        read_json(tmp_path / "one.json")
    for number, name in enumerate(("adapter_config.json", "generation_config.json")):
        own = copied(folder, tmp_path / str(number))
        (own / name).write_text(text)
        work = hf_spec.SpecConfig.from_pretrained if number else fresh("llama").load_adapter
        for load, place in ((work, str(own)), (render_card, own)):
            with pytest.raises((ValueError, OSError), match=name):
                load(place)
