"""Long prompts with questions about them: ``python benchmarks/long_prompts.py --model M -o P``.

Each is a stretch of this repository, its documentation or its source code, and a question at the
end whose answer is a passage somewhere in it: a section or a function to be given word for word.
``hf-spec bench --model M --prompts P --by-task`` has a row for each length and kind. The same
tokenizer, lengths and files give the same prompts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from hf_spec.files import write_atomically

ROOT = Path(__file__).parents[1]
#: Tokens of a prompt that are left to the question and a chat template.
REST = 128


class Kind(NamedTuple):
    """A kind of text.

    Attributes:
        files: patterns below the repository's root.
        passage: finds the name of each passage where it begins.
        question: asks for a passage, given its name.
    """

    files: tuple[str, ...]
    passage: re.Pattern[str]
    question: str


KINDS = {
    "docs": Kind(
        ("docs/*.md", "docs/*/*.md"),
        re.compile(r"^## (.+)$", re.MULTILINE),
        'Above is a documentation. Quote its section "{}" word for word.',
    ),
    "code": Kind(
        ("modeling_patches/*.py", "hf_spec/**/*.py"),
        re.compile(r"^(?:    )?def (\w{6,})\(", re.MULTILINE),
        "Above is the source code of a program. Give its function `{}` word for word.",
    ),
}


def text_of(kind: Kind) -> str:
    """All files of a kind, each after its name."""
    paths = [path for pattern in kind.files for path in sorted(ROOT.glob(pattern))]
    return "\n\n".join(f"{path.relative_to(ROOT)}\n\n{path.read_text()}" for path in paths)


def prompts(tokenizer: Any, lengths: list[int], count: int) -> Iterator[dict[str, Any]]:
    """So many prompts of each kind and length; their passages lie at all depths.

    Raises:
        ValueError: there is not so much text.
    """
    for name, kind in KINDS.items():
        ids = tokenizer(text_of(kind), add_special_tokens=False, verbose=False)["input_ids"]
        for length in lengths:
            size = length - REST
            if not 0 < size <= len(ids):
                raise ValueError(
                    f"prompts of {length} tokens: give numbers from {REST + 1} to "
                    f"{len(ids) + REST}, as {name} has {len(ids)} tokens."
                )
            for place in range(count):
                start = (len(ids) - size) * place // max(count - 1, 1)
                text = tokenizer.decode(ids[start : start + size])
                names = kind.passage.findall(text)
                # Named once, and not the last one, which may be cut off.
                found = [one for one in names[:-1] if names.count(one) == 1]
                question = "Repeat the text above word for word."
                if found:
                    middle = (2 * place + 1) * len(found) // (2 * count)
                    question = kind.question.format(found[middle])
                title = f"{length // 1024}k" if length % 1024 == 0 else str(length)
                yield {"prompt": f"{text}\n\n{question}", "category": f"{title} {name}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="whose tokenizer counts")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 8192, 32768], help="tokens of a prompt"
    )
    parser.add_argument("--count", type=int, default=4, help="prompts of each kind and length")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = prompts(tokenizer, args.lengths, args.count)
    try:
        lines = [json.dumps(row) + "\n" for row in rows]
    except ValueError as error:
        parser.error(str(error))
    write_atomically(args.output, "".join(lines))
    print(f"{args.output}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
