"""The examples of README and documentation: Python is run on the demo model, commands are parsed.

Names of models and adapters are folders in the working directory that lead to the demo model and
its adapters. What cannot run here is marked on its page: ``<!-- skip: next "why" -->``.
"""

import re
import shlex
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_spec.tools.demo
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.tools.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEMO = Path(hf_spec.tools.demo.__file__).parent
OTHERS = Path(__file__).parent / "fixtures" / "demo_adapters"
#: What the examples call models and adapters, and what that is here.
FOLDERS = {
    "org/model": "model", "org/name": "adapters/medusa",
    "org/model-propd": OTHERS / "propd", "medusa": "adapters/medusa", "space": OTHERS / "space",
    "M": "model", "DIR": "adapters/medusa", "skip": OTHERS / "layer_skip",
    "small-ppd": OTHERS / "ppd",
    "hub_cards/adapters/smollm2-135m-instruct-medusa": "adapters/medusa",
}  # fmt: skip
#: Models for chats: the demo model with this template.
CHATS = "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-0.6B"
TEMPLATE = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
PARSER = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])


def with_python(pages: list[Path]) -> list[Path]:
    # This one defines a method; tests/test_docs.py runs it.
    return [p for p in pages if "```python" in p.read_text() and p.stem != "add_a_method"]


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What examples take for granted, in a folder with everything they name."""
    for name, target in FOLDERS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(DEMO / target)
    for chat in CHATS:
        (tmp_path / chat).mkdir(parents=True)
        for file in (DEMO / "model").iterdir():
            (tmp_path / chat / file.name).symlink_to(file)
        (tmp_path / chat / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "rows.jsonl").write_text('{"prompt_ids": [5, 6], "answer_ids": [7]}\n')
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained("org/model", dtype="float32")
    tok = AutoTokenizer.from_pretrained("org/model")
    inputs, longer = (tok(text, return_tensors="pt") for text in ("def f(x):", "def f(x):\n    y"))
    return {
        "hf_spec": hf_spec, "model": model, "tok": tok, "inputs": inputs,
        "turn1": inputs, "turn2": longer, "large": model,
        "small": AutoModelForCausalLM.from_pretrained("org/model", dtype="float32"),
    }  # fmt: skip


@pytest.mark.parametrize("page", with_python(PAGES), ids=lambda page: page.stem)
def test_examples_run(page: Path, scope: dict[str, Any], tmp_path: Path) -> None:
    older = tmp_path / page.name  # Transformers before 5.24 has another name for the cache
    text = page.read_text().replace("cache=out.cache", f"{CACHE}=out.{CACHE}")
    older.write_text(re.sub(r"(max_new_tokens\W+)\d+", r"\g<1>8", text))
    document = PARSER.parse(older)
    document.namespace.update(scope)
    for example in document.examples():
        try:
            example.evaluate()
        except unittest.SkipTest as skipped:
            assert len(str(skipped)) > 10, f"{page.name}: say why an example is skipped"


def commands(text: str) -> Iterator[list[str]]:
    """The words of each ``hf-spec`` command in the code blocks of a page, and in its lines."""
    fenced = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
    lines = [
        line
        for block in re.findall(r"```(?:bash)?\n(.*?)```", text, re.DOTALL)
        for line in re.sub(r"\\\n\s*", " ", block).splitlines()
    ]
    lines += re.findall(r"`(hf-spec [^`]+ --[^`]+)`", fenced.sub("", text))
    for line in lines:
        if line.startswith("hf-spec "):
            yield shlex.split(line.replace("[", " ").replace("]", " "), comments=True)


def test_commands_have_the_options_that_pages_name() -> None:
    root = typer.main.get_command(app)
    found = 0
    for page in PAGES:
        for words in commands(page.read_text()):
            command, rest = root, words[1:]
            while hasattr(command, "commands"):
                assert rest and rest[0] in command.commands, f"{page.name}: {words}"
                command, rest = command.commands[rest[0]], rest[1:]
            known = {"--help", *(name for parameter in command.params for name in parameter.opts)}
            if command.name == "train":  # whose fields are options, too
                known |= {f"--{name.replace('_', '-')}" for name in fields_of(rest[0])}
            given = {word for word in rest if re.match(r"--?[a-z]", word)}
            if command.name not in ("serve", "run"):  # which hand them on
                assert given <= known, f"{page.name}: {sorted(given - known)} in {words}"
            found += 1
    assert found > 20  # the pages have commands, and they are found


def fields_of(method: str) -> set[str]:
    """Of the adapter's config, or of all such configs for METHOD, and of the training arguments."""
    from hf_spec.methods.registry import methods
    from hf_spec.tools.training.arguments import SpecArguments

    named = [methods()[method]] if method in methods() else methods().values()
    fields = {*SpecArguments.__dataclass_fields__}
    for one in named:
        fields |= {*getattr(one.adapter_config, "__dataclass_fields__", ())}
    return fields
