"""What a StepStreamer records of a call, and texts split by their steps."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PAD, ragged
from conftest import prompt as token_ids
from matplotlib.colors import to_rgba
from running import drafting
from tiny_checkpoint import make_tokenizer

import hf_spec
from hf_spec.tools import demo
from hf_spec.tools.demo import StepStreamer, pieces
from hf_spec.tools.loading import load_model

LENGTH = 12
#: Adapters of the demo model that are not shipped with it.
OTHERS = Path(__file__).parents[1] / "fixtures" / "demo_adapters"


def recorded(model: Any, ids: torch.Tensor, **options: Any) -> tuple[StepStreamer, list[int]]:
    """What a call's streamer saw, and the new tokens."""
    streamer = StepStreamer()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=PAD, streamer=streamer, **options,
    )  # fmt: skip
    return streamer, out[0, ids.shape[1] :].tolist()


def test_plain_steps_emit_a_token_each(tiny):
    streamer, new = recorded(tiny("llama_tied"), token_ids(LENGTH))
    assert streamer.steps == [[token] for token in new] and not streamer.trees


def check(model: Any, ids: torch.Tensor, most: int, strategy: str, **options: Any) -> StepStreamer:
    """Steps are those of the statistics; each tree hangs below the step before, and what it
    accepted is what came of it."""
    streamer, new = recorded(model, ids, **drafting(strategy, **options))
    assert new == recorded(model, ids)[1] == [token for step in streamer.steps for token in step]
    counted = Counter(map(len, streamer.steps))
    assert counted == +hf_spec.last_stats(model).accepted_histogram and len(counted) > 1
    assert list(streamer.trees) == list(range(1, len(streamer.steps)))
    for number, step in streamer.trees.items():
        assert len(step.tree) == len(step.tokens) <= 1 + most
        assert step.tokens[0] == streamer.steps[number - 1][-1]
        assert step.emitted == streamer.steps[number] and step.accepted[0] == 0
        for parent, node in zip(step.accepted, step.accepted[1:]):
            assert step.tree.parents[node] == parent
        assert [step.tokens[node] for node in step.accepted[1:]] == step.emitted[:-1]
        probabilities = step.probabilities
        if probabilities is not None:
            assert len(probabilities) == len(step.tree) and probabilities[0] == 1.0
            assert all(
                0 < probabilities[node] <= probabilities[step.tree.parents[node]]
                for node in range(1, len(probabilities))
            )
    assert max(len(step.accepted) for step in streamer.trees.values()) > 1
    return streamer


@pytest.mark.parametrize("strategy", ["prompt_lookup", "layer_skip"])
def test_trees_of_strategies_without_training(tiny, strategy):
    skipped = {"skip_attention": [1], "skip_mlp": []} if strategy == "layer_skip" else {}
    streamer = check(tiny("llama_tied"), token_ids(LENGTH), 64, strategy, **skipped)
    # Only trees that the policy could choose from come with probabilities.
    drafted = [step for step in streamer.trees.values() if len(step.tokens) > 1]
    known = {step.probabilities is not None for step in drafted}
    assert known == {strategy == "prompt_lookup"}


@pytest.fixture(scope="module")
def shipped():
    """The demo model with the adapter of `medusa`, and that of `propd`, which prunes."""
    model, tokenizer = load_model(str(demo.model_folder()), "float32", "cpu")
    for folder in (demo.SHIPPED / "adapters" / "medusa", OTHERS / "propd"):
        model.load_adapter(str(folder), adapter_name=folder.name)
    return model, tokenizer("class Queue:\n    def __init__(self):", return_tensors="pt")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("medusa", {"num_draft_tokens": 5}),
        ("medusa", {"tree": "sparse"}),
        ("propd", {"prune": True}),
    ],
)
def test_trees_of_heads(shipped, strategy, options):
    model, inputs = shipped
    model.set_adapter(strategy)
    most = options.get("num_draft_tokens", 15)
    streamer = check(model, inputs["input_ids"], most, strategy, **options)
    if strategy == "medusa":
        check_drawn(streamer)
    if "num_draft_tokens" in options:  # such a draft is forwarded whole
        assert 5 in {len(step.tokens) - 1 for step in streamer.trees.values()}


def check_drawn(streamer: StepStreamer) -> None:
    """A box for each token of a step's tree, and one for each step's part of a line."""
    sys.path.append(str(Path(__file__).parents[2] / "docs" / "scripts"))
    from step_plots import ACCEPTED, REJECTED, plot_texts, plot_tree

    tokenizer = make_tokenizer()
    step = max(streamer.trees.values(), key=lambda step: len(step.accepted))
    (axes,) = plot_tree(tokenizer, step).get_axes()
    assert len(axes.texts) == len(step.tokens) + 1  # the model's own token
    colors = [text.get_bbox_patch().get_facecolor() for text in axes.texts]
    assert colors.count(to_rgba(ACCEPTED)) == len(step.accepted) - 1
    assert colors.count(to_rgba(REJECTED)) == len(step.tokens) - len(step.accepted)
    (axes,) = plot_texts(tokenizer, {"medusa": streamer.steps}, width=20).get_axes()
    assert len(axes.patches) > 1
    with pytest.raises(ValueError, match="give at least one each"):
        plot_texts(tokenizer, {})


def test_a_batch_is_refused(tiny):
    with pytest.raises(ValueError, match="a batch of 3 sequences: StepStreamer records one"):
        tiny().generate(
            **ragged(), max_new_tokens=4, streamer=StepStreamer(), **drafting("prompt_lookup")
        )


def test_pieces_make_the_text_also_within_a_character():
    tokenizer = make_tokenizer(chat=False)  # a token per byte
    text = "a€ü🙂b"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(text.encode())
    for size in (1, 2, 3, 5, len(tokens)):
        steps = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        found = pieces(tokenizer, steps)
        assert len(found) == len(steps) and "".join(found) == text
