"""What the documentation says runs."""

import dataclasses
import html
import importlib
import json
import re
from collections.abc import Callable

import models_page
import pytest
import torch
from architectures import PADDED, REFUSED, model_types
from conftest import check_same
from running import drafting
from scripts import DOCS, load_script

import hf_spec
from hf_spec.methods import registry

SCRIPTS = DOCS / "scripts"


def texts(picture: str) -> list[str]:
    """Those of a figure."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", (DOCS / "figures" / picture).read_text())


def test_the_example_method_of_the_docs_works(monkeypatch, tmp_path, tiny) -> None:
    text = (DOCS / "guides" / "add_a_method.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    (tmp_path / "echo_of_the_docs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_registered", dict(registry.methods()))
    scope = vars(importlib.import_module("echo_of_the_docs"))
    assert hf_spec.strategies()["echo"] == "repeats the last token"

    model, ids = tiny("llama"), torch.tensor([[5, 9, 7, 7, 7]])
    check_same(model, drafting("echo", length=3), ids, max_new_tokens=40)
    candidates, logits = scope["METHOD"].drafter(model, scope["EchoOptions"]()).get_candidates(ids)
    assert candidates.tolist() == [[5, 9, 7, 7, 7, 7, 7, 7, 7]] and logits is None


def test_every_relative_link_of_the_docs_exists() -> None:
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]
    for page in [*pages, *DOCS.rglob("*.ipynb")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_strategy_has_a_page_with_a_picture() -> None:
    for name in registry.methods():
        page = (DOCS / "methods" / f"{name}.md").read_text()
        assert f"](../figures/{name}.svg)" in page and (DOCS / "figures" / f"{name}.svg").is_file()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r"(\S+\.(?:md|ipynb))$", navigation, re.MULTILINE)
    pages = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in pages)


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (DOCS / "reference" / "api.md").read_text()
    assert set(re.findall(r"^::: hf_spec\.(\w+)$", page, re.MULTILINE)) == {*hf_spec.__all__}


def test_every_public_name_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    site = load_script("site_hooks", SCRIPTS)
    assert list(site.undocumented()) == []

    @dataclasses.dataclass
    class Bare:
        field: int = 0

        def method(self) -> None: ...

    monkeypatch.setattr(hf_spec, "Bare", Bare, raising=False)
    monkeypatch.setattr(hf_spec, "__all__", [*hf_spec.__all__, "Bare"])
    monkeypatch.setattr(Bare, "__module__", "hf_spec.bare")
    missing = [f"hf_spec.Bare{member}" for member in ("", ".field", ".method")]
    assert list(site.undocumented()) == missing


def test_pictures_of_speeds_and_gains_show_what_the_benchmark_page_says() -> None:
    figures = load_script("figures", SCRIPTS)
    page = figures.BENCHMARKS.read_text()
    (names, speeds), shown = figures.read_speeds(page), texts("speed.svg")
    assert set(" ".join(names).split()) <= set(" ".join(shown).split())
    bars = [f"{value:.2f}" for values in speeds.values() for value in values if value is not None]
    assert len(names) > 3 and len(bars) > len(names)
    assert [text for text in shown if re.fullmatch(r"\d\.\d\d", text)] == bars
    gains, shown = figures.read_gains(page), texts("gain.svg")
    assert [*gains] == [text for text in shown if text in gains]
    plain = gains[figures.BASELINE]
    labels = [f"{value:g}  ({value / plain:.2f}x)" for value in gains.values()]
    assert labels == [text for text in shown if text.endswith("x)")]


def test_charts_show_what_their_tables_say() -> None:
    charts = load_script("charts", SCRIPTS)
    pages = " ".join(page.read_text() for page in (DOCS / "inside").glob("*.md"))
    for name in charts.CHARTS:
        picture = (DOCS / "figures" / f"{name}.svg").read_text()
        [said] = re.findall(r"<dc:description>(.*?)</dc:description>", picture, re.DOTALL)
        places, series = charts.data_of(name)
        assert json.loads(html.unescape(said)) == [places, series]
        assert all(len(values) == len(places) > 2 for values in series.values())
        assert f"](../figures/{name}.svg)" in pages
    with pytest.raises(ValueError, match="there is no table below 'nothing'"):
        charts.read_table("text", "nothing")


def test_the_readme_has_the_speeds_of_the_benchmark_page() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    page, read_table = (DOCS / "inside" / "benchmarks.md").read_text(), load_table_reader()
    assert len(readme.splitlines()) <= 110
    measured = {row[0]: row[2].split()[0] for row in read_table(page, "### bfloat16, with AMX")[1]}
    shown = [(name, speed) for name, _, speed in read_table(readme, "sets up `.venv`")[1]]
    strategies = {name: re.findall(r"\[(\w+)\]", name) for name, _ in shown}
    assert sorted(sum(strategies.values(), ["plain"])) == sorted(registry.methods())
    for name, speed in shown:
        assert all(measured.get(one, "not measured") == speed for one in strategies[name])
    gains = load_script("figures", SCRIPTS).read_gains(page)
    ratio = gains["medusa, recorded"] / gains["generate, compiled"]
    assert f"{ratio:.2f} times as fast as `generate` compiled by Transformers" in readme


def load_table_reader() -> Callable[[str, str], tuple[list[str], list[list[str]]]]:
    return load_script("charts", SCRIPTS).read_table


def test_the_page_of_models_is_that_of_the_sweep() -> None:
    every = " ".join(registry.methods())
    none = {kind for kind, names in REFUSED.items() if names == every} - {*PADDED}
    reasons = models_page.listed()
    assert set(reasons) == none and all(reasons.values())
    text = models_page.PAGE.read_text()
    assert [kind for kind in model_types() if f"`{kind}`" not in text] == []


def test_the_picture_of_steps_shows_the_tour() -> None:
    tour = (DOCS / "tour.ipynb").read_text()
    for name, row in (("plain generate", "plain"), ("medusa", "medusa")):
        [title] = [text for text in texts(f"steps_{row}.svg") if text.startswith(f"{name}: ")]
        tokens, steps = map(int, re.findall(r"\d+", title))
        assert tokens == 46 and re.search(rf"{row} +{steps} +\d", tour)


def test_every_file_names_the_same_version() -> None:
    citation = (DOCS.parent / "CITATION.cff").read_text()
    changes = (DOCS.parent / "CHANGELOG.md").read_text()
    assert re.search(r"^version: (\S+)$", citation, re.MULTILINE)[1] == hf_spec.__version__
    assert re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == hf_spec.__version__


def test_tables_of_few_columns_are_lists_on_phones_and_notebooks_open_in_colab() -> None:
    site = load_script("site_hooks", SCRIPTS)
    rows = "<tr><td><code>a</code></td><td></td></tr>"
    head = "<tr><th>name</th><th><em>so &amp; so</em></th></tr>"
    table = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
    expected = table.replace("<td><code>", '<td data-label="name"><code>')
    expected = expected.replace("<td></td>", '<td data-label="so &amp; so"></td>')
    assert site.on_page_content(f"<p>{table}</p>") == f"<p>{expected}</p>"
    wide = table.replace("</th></tr>", f"</th>{'<th>x</th>' * 4}</tr>")
    assert site.on_page_content(wide) == wide
    address = "https://colab.research.google.com/github/a/b/blob/main/docs/examples/x.ipynb"
    assert f"]({address})" in site.colab("https://github.com/a/b", "examples/x.ipynb")
