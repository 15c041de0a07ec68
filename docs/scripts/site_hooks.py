"""What MkDocs asks while it builds the site: generated parts of pages, notebooks as pages, and a
check of docstrings.

A page has a line ``<!-- generated: NAME ARGUMENT -->`` where something is put in:

* ``commands``: the help of every command of ``hf-spec``;
* ``strategies``: a table of all strategies;
* ``example NAME``: the program docs/examples/NAME.py;
* ``fields NAME``: a table of the fields of a config or of the options that ``hf_spec`` exports.
"""

from __future__ import annotations

import configparser
import dataclasses
import html
import inspect
import json
import logging
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.structure.files import File, Files

import hf_spec
from hf_spec.core.checks import said_of
from hf_spec.threads import cached_property
from hf_spec.tools.cli.main import app

log = logging.getLogger("mkdocs.hooks.hf_spec")  # warnings of this logger fail a strict build
ROOT = Path(__file__).parents[2]
WIDTH = 96
MEMBERS = (
    types.FunctionType, classmethod, staticmethod, property, cached_property,
)  # fmt: skip
#: Columns of tables that are lists on phones.
LISTED = 5
TABLE, HEAD = (
    re.compile(r"<table>.*?</table>", re.DOTALL),
    re.compile(r"<th[ >].*?</th>", re.DOTALL),
)
MARKER = re.compile(r"<!-- generated: (\w+) ?(\w*) -->")


def on_config(config: Any) -> Any:
    """The version beside the site's name, and a link to the repository if setup.cfg has its URL."""
    config.site_name = f"{config.site_name} {hf_spec.__version__}"
    if url := repository():
        config.repo_url = url
        config.repo_name = url.removeprefix("https://").partition("/")[2]
    return config


def repository() -> str | None:
    """The source's URL of ``project_urls`` in setup.cfg, the one place that has it."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings.get("metadata", "project_urls", fallback="").strip().splitlines()
    urls = dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in lines)
    return next((urls[name] for name in ("Source", "Repository", "Homepage") if name in urls), None)


def on_pre_build(config: Any) -> None:
    for name in undocumented():
        log.warning("public name without documentation: %s", name)


class Notebook(File):
    """A notebook, which becomes a page under its own name."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: Any) -> Files:
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = Notebook(file.src_uri, file.src_dir, file.dest_dir, file.use_directory_urls)
        page.content_string = "\n\n".join(blocks(json.loads(file.content_string)))
        if (url := repository()) and file.src_uri.startswith("examples/"):
            page.content_string = f"{colab(url, file.src_uri)}\n\n{page.content_string}"
        files.remove(file)
        files.append(page)
    return files


def colab(url: str, path: str) -> str:
    """A link that opens a notebook of the documentation in Colab, from the repository on GitHub."""
    place = f"{url.removeprefix('https://github.com/')}/blob/main/docs/{path}"
    return f"[Open in Colab](https://colab.research.google.com/github/{place}){{ .md-button }}"


def blocks(notebook: dict[str, Any]) -> Iterator[str]:
    """The cells and outputs of a notebook as Markdown; of outputs, text and PNG images."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            shown = output.get("data", {"text/plain": output.get("text", ())})
            if "image/png" in shown:
                image = "".join(shown["image/png"].split())
                yield f'<p><img alt="" src="data:image/png;base64,{image}"></p>'
            else:
                yield f"```text\n{''.join(shown['text/plain']).rstrip()}\n```"


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    return MARKER.sub(lambda found: GENERATED[found[1]](*filter(None, [found[2]])), markdown)


def on_page_content(content: str, **kwargs: Any) -> str:
    return TABLE.sub(lambda found: labeled(found[0]), content)


def labeled(table: str) -> str:
    """A table of few columns whose cells know the names of their columns: on a phone it is a list,
    see docs/assets/site.css."""
    names = [html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in HEAD.findall(table)]
    if len(names) > LISTED:
        return table

    def row(found: re.Match[str]) -> str:
        places = iter(names)
        return re.sub(
            r"<td", lambda cell: f'<td data-label="{html.escape(next(places, ""))}"', found[0]
        )

    return re.sub(r"<tr>.*?</tr>", row, table, flags=re.DOTALL)


def undocumented() -> Iterator[str]:
    """Public names of ``hf_spec``, their methods, properties and fields that nothing describes."""
    for name in hf_spec.__all__:
        value = getattr(hf_spec, name)
        if not described(value):
            yield f"hf_spec.{name}"
        if not inspect.isclass(value):
            continue
        if dataclasses.is_dataclass(value):
            text = "".join(base.__doc__ for base in ours(value) if described(base))
            for field in dataclasses.fields(value):
                written = re.search(rf"\b{field.name}\b", text)
                written = written or said_of(value, field.name).get("help")
                if not written and not foreign(value, field.name):
                    yield f"hf_spec.{name}.{field.name}"
        for member, inside in vars(value).items():
            if member.startswith("_") or not isinstance(inside, MEMBERS):
                continue
            bases = [base for base in value.__mro__ if member in vars(base)]
            if not any(vars(base)[member].__doc__ for base in bases):
                yield f"hf_spec.{name}.{member}"


def described(value: Any) -> bool:
    text = inspect.getdoc(value) if inspect.isroutine(value) else value.__doc__
    # What dataclasses writes itself is no documentation.
    return bool(text) and not text.startswith(f"{value.__name__}(")


def ours(value: type) -> list[type]:
    return [base for base in value.__mro__ if base.__module__.startswith("hf_spec")]


def foreign(value: type, field: str) -> bool:
    """Whether a field comes from a base class of another package."""
    return not any(field in vars(base).get("__annotations__", {}) for base in ours(value))


def commands() -> str:
    """The help of every command, as the terminal shows it."""
    root = typer.main.get_command(app)
    settings = {"terminal_width": WIDTH, **root.context_settings}
    context = click.Context(root, info_name="hf-spec", **settings)
    return "\n".join(helps(root, context))


def helps(command: Any, context: click.Context) -> Iterator[str]:
    """The help of a command and of those below it."""
    yield f"### `{context.command_path}`\n\n```text\n{command.get_help(context).strip()}\n```\n"
    for name, child in getattr(command, "commands", {}).items():
        settings = {"terminal_width": WIDTH, **child.context_settings}
        with click.Context(child, parent=context, info_name=name, **settings) as inner:
            yield from helps(child, inner)


def strategies() -> str:
    rows = [f"| [`{name}`](methods/{name}.md) | {line} |" for name, line in listed()]
    return "\n".join(["| strategy | |", "| --- | --- |", *rows])


def listed() -> list[tuple[str, str]]:
    return list(hf_spec.strategies().items())


def fields(name: str) -> str:
    """A table of a dataclass's fields; a config's have their help in the metadata."""
    value = getattr(hf_spec, name)
    rows = ["| field | default | |", "| --- | --- | --- |"]
    for field in dataclasses.fields(value):
        if foreign(value, field.name):
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        text = said_of(value, field.name).get("help", "").replace("|", "\\|")
        rows.append(f"| `{field.name}` | `{default!r}` | {text} |")
    return "\n".join(rows)


def example(name: str) -> str:
    """A program of docs/examples."""
    return f"```python\n{(ROOT / 'docs' / 'examples' / f'{name}.py').read_text().rstrip()}\n```"


GENERATED: dict[str, Callable[..., str]] = {
    "commands": commands, "strategies": strategies, "fields": fields, "example": example,
}  # fmt: skip
