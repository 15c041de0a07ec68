"""No deprecation of a library underneath reaches the user: they are told of what they call."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Tiny, prompt, ragged
from test_method_contract import FIRST, adapted, strategy
from tiny_checkpoint import save_checkpoint, write_prompts
from transformers.utils.logging import warning_once

from hf_spec.modeling_patches.modules import CACHE
from hf_spec.tools import cli

#: What PEFT 0.21 itself reads of a model.
OF_PEFT = "is_gradient_checkpointing"


@pytest.fixture
def nothing_deprecated(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if something deprecated was used, by a warning or by the log of Transformers."""
    warning_once.cache_clear()  # it may have been told of before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    warned = [
        f"{one.filename}: {one.message}"
        for one in caught
        if issubclass(one.category, (FutureWarning, DeprecationWarning))
    ]
    logged = [one.getMessage() for one in caplog.records]
    logged = [text for text in logged if "deprecated" in text]
    assert [text for text in warned + logged if OF_PEFT not in text] == []


@pytest.mark.usefixtures("nothing_deprecated")
@pytest.mark.parametrize(("name", "variant"), FIRST)
def test_generate(tiny: Tiny, name: str, variant: str) -> None:
    model, spec = tiny(), strategy(name, variant)
    with adapted(model, name, variant):
        options = {"max_new_tokens": 8, "return_dict_in_generate": True, **spec}
        model.generate(**ragged(), do_sample=True, output_scores=True, **options)
        out = model.generate(prompt(), do_sample=False, **options)
        model.generate(out.sequences, do_sample=False, **{CACHE: out[CACHE]}, **options)


@pytest.mark.usefixtures("nothing_deprecated")
def test_commands(tmp_path: Path) -> None:
    """Data, a training with an evaluation, and a benchmark beside stock prompt lookup."""
    model, data, adapter = (str(tmp_path / name) for name in ("model", "data", "adapter"))
    save_checkpoint(Path(model))
    rows = [{"prompt": f"{number} ab ab ab"} for number in range(8)]
    prompts = str(write_prompts(tmp_path / "prompts.jsonl", rows))
    given = ["--model", model, "--dtype", "float32"]
    length = ["--max-new-tokens", "12"]
    for words in (
        ["distill", *given, "--prompts", prompts, "--output", data, *length],
        [
            "train", "bita", *given, "--data", data, "--output", adapter, "--max-steps", "2",
            "--eval-steps", "2", "--held-out", "2", "--served-tokens", "4",
        ],
        [
            "bench", *given, "--prompts", prompts, "--adapter", adapter, *length, "--limit", "2",
            "--strategies", "bita,transformers:prompt_lookup", "--output", str(tmp_path / "bench"),
        ],
    ):  # fmt: skip
        assert cli.main(words) == 0
