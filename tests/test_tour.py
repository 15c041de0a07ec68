"""docs/tour.ipynb runs, and is stored with its outputs."""

import json
import re
from typing import Any

import nbformat
import pytest
from scripts import DOCS, load_script

from hf_spec.tools.demo import FREE_STRATEGY, adapter_folders

#: What can run without training.
SHOWN = {"plain", FREE_STRATEGY, *(path.name for path in adapter_folders())}


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(DOCS / "tour.ipynb", as_version=4)


@pytest.mark.environment
def test_every_strategy_writes_what_plain_generation_writes(notebook: Any) -> None:
    tour = load_script("tour", DOCS / "scripts")
    tokens = "import json\nprint(json.dumps({name: run.steps for name, run in runs.items()}))"
    notebook.cells.append(nbformat.v4.new_code_cell(tokens))
    tour.run(notebook, DOCS)
    steps = json.loads(notebook.cells[-1].outputs[0].text)
    assert set(steps) == SHOWN
    texts = {name: sum(found, []) for name, found in steps.items()}
    assert all(text == texts["plain"] for text in texts.values())
    assert all(len(found) < len(steps["plain"]) for name, found in steps.items() if name != "plain")


def test_it_is_stored_with_its_outputs(notebook: Any) -> None:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, 1 + len(cells)))
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 2
    assert all(output.output_type in ("stream", "execute_result") for output in outputs)
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)
    table = re.findall(r"^(\w+) +\d+ +\d\.\d\d  (yes|no)$", outputs[-1].text, re.MULTILINE)
    assert table == [(name, "yes") for name in dict.fromkeys(["plain", *dict(table)])]
    assert set(dict(table)) == SHOWN
    assert (DOCS / "tour.ipynb").stat().st_size < 500_000
    assert "/home/" not in nbformat.writes(notebook)
