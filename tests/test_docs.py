"""What the documentation says runs."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from running import drafting

import hf_spec
from hf_spec.methods import registry

DOCS = Path(__file__).parent.parent / "docs"


def test_the_example_method_of_the_docs_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny
) -> None:
    text = (DOCS / "guides" / "add_a_method.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    (tmp_path / "echo_of_the_docs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_registered", dict(registry.methods()))
    scope = vars(importlib.import_module("echo_of_the_docs"))
    assert hf_spec.strategies()["echo"] == "repeats the last token"

    model = tiny("llama")
    ids = torch.tensor([[5, 9, 7, 7, 7]])
    plain = model.generate(ids, max_new_tokens=40, do_sample=False)
    ours = model.generate(
        ids, max_new_tokens=40, do_sample=False, **drafting("echo", length=3),
    )  # fmt: skip
    assert torch.equal(plain, ours)
    candidates, logits = scope["METHOD"].drafter(model, scope["EchoOptions"]()).get_candidates(ids)
    assert candidates.tolist() == [[5, 9, 7, 7, 7, 7, 7, 7, 7]] and logits is None


def test_every_relative_link_of_the_docs_exists() -> None:
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_strategy_has_a_page() -> None:
    for name in registry.methods():
        assert (DOCS / "methods" / f"{name}.md").is_file()
