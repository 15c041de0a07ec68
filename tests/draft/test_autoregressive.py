"""Drafters with a decoder of their own draft in every step what they draft from scratch."""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from adapter_oracle import randomise
from conftest import Tiny, check_same, ragged
from running import CAPTURED, as_if, draft_everything, drafting
from step_by_hand import chain, commit
from transformers import PreTrainedModel

import hf_spec
from hf_spec.core.verify import HostResult
from hf_spec.draft.policy import StepPolicy
from hf_spec.methods.eagle3 import Eagle3Config
from hf_spec.predict import network
from hf_spec.predict.network import DraftCache, NetworkPredictor
from hf_spec.target.sequences import token_hidden
from hf_spec.threads import memory

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
#: All tokens of the vocabulary below the root, so that each step accepts some.
BUSHY = {"num_draft_tokens": 200, "max_depth": 3, "width": 61}


@pytest.fixture
def model(fresh: Tiny) -> PreTrainedModel:
    return adapted(fresh("llama"))


def adapted(model: Any, **fields: Any) -> Any:
    model.add_adapter(Eagle3Config(**{"draft_vocab_size": 0, **fields}))
    randomise(model, "EAGLE3")
    return model


def chain_anew(drafter: Any, tokens: list[int]) -> list[int]:
    """The likeliest token of each level after a text, all of which a copy of the drafter runs."""
    ids, known = torch.tensor([tokens]), len(tokens) - 1
    own = copy.copy(drafter)
    own.cache = DraftCache(own.network.num_layers, 1, ids.device)
    own._root = own._block = own._level = None
    hidden = token_hidden(own.model, ids[:, :-1], layers=own.reads.layers)
    commit(own, ids, hidden, [(0, known)], HostResult([range(known)], [tokens[1:]], [0]))
    return chain(own, depth=own.depth)[0][0].tolist()


@contextmanager
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Each proposed tree is compared with the chain of a new drafter that runs the whole text
    again. Grows by the length of each chain."""
    steps: list[int] = []
    propose = hf_spec.Drafter.propose

    def checked(self: Any, state: Any) -> Any:
        tree = propose(self, state)
        for row, tokens in enumerate(state.tokens):
            if not state.active[row] or tree.row_sizes[row] == 0:
                continue
            expected = chain_anew(self.predictor, tokens)
            host, node, drafted = tree.host.rows(tree.row_sizes)[row], 0, []
            while True:  # the likeliest child comes first
                below = [n for n, above in enumerate(host.parents) if above == node and n]
                if not below:
                    break
                node = below[0]
                drafted.append(host.tokens[node])
            assert drafted and drafted == expected[: len(drafted)]
            steps.append(len(drafted))
        return tree

    with monkeypatch.context() as patch:
        patch.setattr(hf_spec.Drafter, "propose", checked)
        yield steps


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("options", [BUSHY, {"tree": "chain"}, {"num_draft_tokens": 6}])
def test_drafts_in_a_shrinking_batch(
    model: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], ahead: bool
) -> None:
    as_if(ahead, monkeypatch)
    free = model.generate(**ragged(), **GREEDY)
    settings = {**ragged(), **GREEDY, "eos_token_id": [int(free[0, 19]), int(free[2, 28])]}
    with compared(monkeypatch) as steps:
        check_same(model, drafting("eagle3", **options), **settings)
    assert len(steps) > 15
    if options is BUSHY:
        assert max(steps) > 1
        assert hf_spec.last_stats(model).mean_accepted_tokens > 1.5


def test_drafts_after_steps_that_did_not_draft(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_everything(monkeypatch)
    turns = iter([True, False, False] * 100)
    monkeypatch.setattr(StepPolicy, "wants_draft", lambda self, lookup=False: next(turns))
    spec = {"assistant_strategy": "eagle3", "assistant_kwargs": {"lookup": False}}
    with compared(monkeypatch) as steps:
        check_same(model, spec, **ragged(), **GREEDY)
    assert len(steps) > 9


@pytest.mark.parametrize("way", [{}, CAPTURED], ids=["eager", "recorded"])
def test_trees_grow_only_for_steps_that_draft(
    model: Any, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    """What was committed is taken in once, and not after the last token."""
    draft_everything(monkeypatch)
    turns, counts = iter([True, False, False, True] * 100), Counter[str]()
    advance, levels = NetworkPredictor.advance, NetworkPredictor.levels
    received = NetworkPredictor.received

    def drafts(self: Any, lookup: bool = False) -> bool:
        counts["drafting steps"] += (drafts := next(turns))
        return drafts

    def noted(name: str, method: Any) -> Any:
        def called(self: Any, *given: Any) -> Any:
            counts[name] += not self.cache.is_given
            return method(self, *given)

        return called

    monkeypatch.setattr(StepPolicy, "wants_draft", drafts)
    monkeypatch.setattr(NetworkPredictor, "advance", noted("taken in", advance))
    monkeypatch.setattr(NetworkPredictor, "received", noted("taken in", received))
    monkeypatch.setattr(NetworkPredictor, "levels", noted("grown", levels))
    spec = {"assistant_strategy": "eagle3", "assistant_kwargs": {"lookup": False}}
    model.generate(**ragged(), **GREEDY, **spec, **way)
    steps = hf_spec.last_stats(model).num_steps
    if not way:  # a program has no host to ask
        assert counts["grown"] == counts["drafting steps"] > 5
        assert counts["taken in"] == steps - 1
    else:
        assert counts["grown"] == 1 and counts["taken in"] == steps


def test_windows_are_rings(fresh: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new drafter's cache keeps all; prompts come in parts, which are shorter than a ring."""
    monkeypatch.setattr(network, "AT_ONCE", 20)
    model, slots = fresh("gemma3"), set()
    model.config.mtp_layer_types = ["sliding_attention"]
    model.config.max_position_embeddings = 256
    observe = NetworkPredictor.observe

    def noted(self: Any, *given: Any) -> None:
        slots.add(self.cache.layers[0].views["keys"].shape[2])
        observe(self, *given)

    monkeypatch.setattr(NetworkPredictor, "observe", noted)
    with compared(monkeypatch) as steps:
        check_same(model, drafting("mtp"), **ragged((220, 150)), **GREEDY)
    assert len(steps) > 3 and slots == {128}


@pytest.mark.usefixtures("sizes_as_shipped")
def test_compiled_levels(shallow: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few graphs, and the drafts are those of levels that are not compiled."""
    model: Any = adapted(shallow("llama_tied"), draft_vocab_size=40)
    spec = {**CAPTURED, **drafting("eagle3", max_depth=3, width=3)}
    with compared(monkeypatch) as steps:
        for _ in range(2):
            out = check_same(model, {**spec, "return_dict_in_generate": True}, **ragged(), **GREEDY)
    assert len(steps) > 20 and not out.spec_stats.details["compiled"]["refused"]
    graphs = [key for key in memory(model)["graphs"].graphs if key[1][0] == "draft"]
    assert 1 <= len(graphs) <= 4  # one for each size of the steps' trees
