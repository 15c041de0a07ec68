"""Train the adapters of the demo model anew: ``python benchmarks/train_demo_adapters.py OUTPUT``.

The demo model continues code of the installed Transformers, and ``hf-spec train`` makes an adapter
of each kind out of that, with its defaults but for fewer epochs;
``hf-spec search`` finds the layers to skip. About half an hour on one core. OUTPUT then holds
``answers`` and a folder per strategy. ``bita`` and ``medusa``, rounded by ``round_weights.py``, go
to ``hf_spec/tools/demo/adapters``; the others to ``tests/fixtures/demo_adapters``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from demo_data import modeling_files, read_source

from hf_spec.tools.demo import model_folder

SEED, PROMPTS, LINES, NEW_TOKENS = 20261123, 800, (8, 40), 128
METHODS, EPOCHS = ("bita", "medusa", "ppd", "propd", "space"), 4
SEARCH = ["--trials", "60", "--limit", "6", "--max-new-tokens", "48", "--threads", "1"]


def prompts() -> list[dict[str, str]]:
    """Stretches of code, each with the number of lines drawn from `LINES`."""
    draw, found = random.Random(SEED), []
    files = [read_source(path) for path in modeling_files()]
    files = [text for text in files if text.count("\n") > 2 * LINES[1]]
    while len(found) < PROMPTS:
        lines = draw.choice(files).splitlines(keepends=True)
        count = draw.randint(*LINES)
        start = draw.randrange(len(lines) - count)
        found.append({"prompt": "".join(lines[start : start + count]), "category": "code"})
    return found


def main(output: Path) -> None:
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    asked, answers = output / "demo_train.jsonl", output / "answers"
    # What is written names the base model as it is named from the top of the repository.
    root = Path(__file__).resolve().parent.parent
    model = str(model_folder().relative_to(root))
    asked.write_text("".join(json.dumps(item) + "\n" for item in prompts()))

    def run(*words: str) -> None:
        command = [sys.executable, "-m", "hf_spec.tools.cli", *words, "--model", model]
        subprocess.run(command, cwd=root, check=True)

    run("distill", "--prompts", str(asked), "--output", str(answers),
        "--max-new-tokens", str(NEW_TOKENS), "--batch-size", "16")  # fmt: skip
    for name in METHODS:
        folder = output / name
        if not (folder / "training.json").is_file():
            run("train", name, "--data", str(answers), "--output", str(folder),
                "--num-train-epochs", str(EPOCHS))  # fmt: skip
    skip = output / "layer_skip"
    if not (skip / "search.json").is_file():
        run("search", "--prompts", str(asked), "--output", str(skip), *SEARCH)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
