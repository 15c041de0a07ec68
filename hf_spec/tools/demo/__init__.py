"""What the demo runs: models, adapters that fit them, prompts; and what steps of a call emit."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_spec.adapters.config import facts_of
from hf_spec.core.shapes import TokenTree
from hf_spec.core.tree import Tree
from hf_spec.core.verify import HostResult
from hf_spec.files import read_json
from hf_spec.tools.bench.prompts import BUNDLED, read_prompts, spread
from hf_spec.tools.data import Prompt
from hf_spec.tools.hub import CONFIG
from hf_spec.tools.loading import Adapter, load_adapters, load_model, read_adapters

SHIPPED = Path(str(files("hf_spec.tools.demo")))
#: Adapters of popular models, ready for the Hub; wheels don't have them.
PUBLISHED = Path(str(files("hf_spec.hub_cards"))) / "adapters"
#: Needs neither training nor an adapter.
FREE_STRATEGY = "token_recycling"
#: Beginnings of classes in the style that the demo model has learned, written for this package.
PROMPTS = SHIPPED / "prompts.jsonl"


def model_folder() -> Path:
    """The model shipped with the package."""
    return SHIPPED / "model"


def adapter_folders(root: Path = SHIPPED / "adapters") -> list[Path]:
    """The adapters for the demo model that are shipped with the package, or those in a folder."""
    return sorted(path.parent for path in root.glob("*/adapter_config.json"))


def fitting(model: Any) -> list[Path]:
    """The :data:`PUBLISHED` adapters that were made for a model of this shape."""
    facts, folders = facts_of(model), adapter_folders(PUBLISHED)
    return [one for one in folders if read_json(one / CONFIG).get("base_facts") == facts]


def load(name: str | None, dtype: str, limit: int) -> tuple[Any, Any, list[Adapter], list[Prompt]]:
    """The shipped model, or another one with the published adapters that fit it: model, tokenizer,
    the adapters that it has, and at most ``limit`` prompts."""
    if name is None:
        adapters = read_adapters(map(str, adapter_folders()))
        model, tokenizer = load_model(str(model_folder()), dtype, adapters=adapters)
        return model, tokenizer, adapters, read_prompts(PROMPTS)[:limit]
    model, tokenizer = load_model(name, dtype)
    adapters = read_adapters(map(str, fitting(model)))
    load_adapters(model, adapters)
    return model, tokenizer, adapters, spread(read_prompts(BUNDLED), limit)


# -- Collects what each step of a call emits and verifies, and splits a text by its steps ----------


@dataclass(frozen=True)
class VerifiedTree:
    """The draft tree of one step, and which of its tokens were accepted.

    Attributes:
        tree: the root, which is the last token of the step before, and the draft tokens below it.
        tokens: token id of each node.
        probabilities: of each node, the estimate that it and all nodes above it are accepted; None
            if the strategy does not estimate it.
        accepted: the accepted nodes in order, the root first.
        emitted: the tokens that the step emitted: the accepted draft tokens, then the bonus token.
    """

    tree: TokenTree
    tokens: list[int]
    probabilities: list[float] | None
    accepted: list[int]
    emitted: list[int]


class StepStreamer(BaseStreamer):
    """A streamer that records a call step by step; ``generate(..., streamer=StepStreamer())``.

    It works for one sequence, with and without a strategy. Plain generation emits one token per
    step. A strategy's first step is the forward pass of the prompt, which verifies no tree.

    Attributes:
        steps: the tokens that each step emitted.
        trees: the tree that a step verified, by index in ``steps``.
    """

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.trees: dict[int, VerifiedTree] = {}
        self._put: list[int] = []
        self._is_prompt, self._has_steps = True, False

    def put(self, value: Tensor) -> None:
        """Receive the prompt ``(1, seq)``, then each new token ``(1,)``; a ValueError for more than
        one sequence."""
        if len(value) > 1:
            raise ValueError(
                f"a batch of {len(value)} sequences: StepStreamer records one sequence, as all "
                "streamers of Transformers do. Generate with batch size 1."
            )
        if self._is_prompt:
            self._is_prompt = False
        else:
            self._put += value.flatten().tolist()

    def end_step(self) -> None:
        """Count the tokens received since the last call as one step."""
        self._has_steps = True
        if self._put:
            self.steps.append(self._put)
            self._put = []

    def see_step(self, tree: Tree, result: HostResult) -> None:
        """Record the tree of the step that has just ended, and what was accepted of it."""
        count = 1 + tree.row_sizes[0]
        self.trees[len(self.steps) - 1] = VerifiedTree(
            TokenTree(tuple(tree.parents[0, :count].tolist())),
            tree.tokens[0, :count].tolist(),
            tree.host.probs[0, :count].tolist() if tree.host and tree.ranked else None,
            list(result.path[0]),
            self.steps[-1],
        )

    def end(self) -> None:
        """Complete the last step."""
        if self._has_steps:
            self.end_step()
        else:
            self.steps = [[token] for token in self._put]


def pieces(tokenizer: Any, steps: Sequence[Sequence[int]]) -> list[str]:
    """Split a text, without special tokens, into the parts that its steps wrote.

    A character whose bytes come from two steps belongs to the second; a step that completes none
    has an empty part.
    """
    found: list[str] = []
    tokens: list[int] = []
    shown = ""
    for step in steps:
        tokens += step
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        whole = text if len(found) == len(steps) - 1 else text.rstrip("\ufffd")
        found.append(whole[len(shown) :])
        shown = whole if len(whole) > len(shown) else shown
    return found
