"""Train the adapters of the demo model anew: ``python benchmarks/train_demo_adapters.py OUTPUT``.

The demo model answers beginnings of the standard library's code that are not in the demo's own
prompts, and ``hf-spec train`` makes an adapter of each kind out of that, with its defaults but for
what keeps files small and the training short; ``hf-spec search`` finds the layers to skip. About
half an hour on one core. OUTPUT then holds ``answers`` and a folder per strategy; those go to
``hf_spec/demo/adapters``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from hf_spec.demo.demo import model_folder
from hf_spec.demo.prompts import library_files

SEED, PROMPTS, LINES, NEW_TOKENS = 20261122, 400, (8, 40), 128
#: Fields and options that differ from the defaults: files are to be small, and soon made.
SMALL = ["--epochs", "3", "--transition-rank", "64"]
SETTINGS = {
    "bita": SMALL,
    "medusa": SMALL,
    "ppd": SMALL,
    "propd": SMALL,
    "space": [*SMALL, "--rank", "8"],
}
SEARCH = ["--trials", "60", "--limit", "6", "--max-new-tokens", "48", "--threads", "1"]


def prompts() -> list[dict[str, str]]:
    """Stretches of code, each with the number of lines drawn from `LINES`."""
    draw, found = random.Random(SEED), []
    files = [path.read_text(encoding="utf-8", errors="replace") for path in library_files()]
    files = [text for text in files if text.count("\n") > 2 * LINES[1]]
    while len(found) < PROMPTS:
        lines = draw.choice(files).splitlines(keepends=True)
        count = draw.randint(*LINES)
        start = draw.randrange(len(lines) - count)
        found.append({"prompt": "".join(lines[start : start + count]), "category": "code"})
    return found


def main(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    asked, answers, model = output / "demo_train.jsonl", output / "answers", str(model_folder())
    asked.write_text("".join(json.dumps(item) + "\n" for item in prompts()))
    hf_spec = [sys.executable, "-m", "hf_spec.cli"]
    subprocess.run(
        [*hf_spec, "distill", "--model", model, "--prompts", str(asked), "--output", str(answers),
         "--max-new-tokens", str(NEW_TOKENS), "--batch-size", "16"], check=True,
    )  # fmt: skip
    for name, fields in SETTINGS.items():
        folder = output / name
        if not (folder / "training.json").is_file():
            subprocess.run(
                [*hf_spec, "train", name, "--model", model, "--data", str(answers), "--output",
                 str(folder), *fields], check=True,
            )  # fmt: skip
    skip = output / "layer_skip"
    if not (skip / "search.json").is_file():
        subprocess.run(
            [*hf_spec, "search", "--model", model, "--prompts", str(asked), "--output", str(skip),
             *SEARCH], check=True,
        )  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
