"""Assistants that attend to the model's keys and values (Gemma 4): what they draft is what their
own forward says of the committed tokens alone, and the output is the model's."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from architectures import assistant_for, base_of, build, config_class, random_model
from conftest import check_continued, check_same, prompt, ragged, shared
from covering import covering
from replay import RECORDED
from running import CAPTURED, no_forward
from test_draft_model import drafts
from torch import Tensor
from transformers.generation.candidate_generator import (
    SinglePositionMultiTokenCandidateGenerator as StockGenerator,
)

import hf_spec
from hf_spec.draft.grow import Frontier
from hf_spec.methods.draft_model import SharedKVPredictor
from hf_spec.modeling_patches import forwards
from hf_spec.target.graphs import Graphs

GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
GIVEN = {"row": {"input_ids": prompt()}, "batch": ragged()}
#: With windows, no longer than these, of 5; the last with keys that later layers share.
BASES = ["gemma4_text", "gemma4", "gemma4_unified", "shared"]
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tree": ({}, {}),
    "wide": ({"num_draft_tokens": 61, "max_depth": 1}, {}),  # of which one is nearly always right
    "chain": ({"tree": "chain", "lookup": True}, {}),
    "penalty": ({"width": 2}, {"repetition_penalty": 1.3, "min_new_tokens": 8}),
    "sampled": ({}, {"do_sample": True, "temperature": 1.5, "top_k": 20}),
}


class Asked(NamedTuple):
    """A level that was asked for: the tokens so far, and the paths to its nodes.

    Attributes:
        rows: of each row, its tokens and whether it is unfinished.
        paths: ``(batch, nodes)`` tokens below the root.
    """

    rows: list[tuple[list[int], bool]]
    paths: list[list[list[int]]]
    logits: Tensor


@contextmanager
def watched() -> Iterator[list[Asked]]:
    """Collects what the drafters of this block answer."""
    seen: list[Asked] = []
    rows: list[tuple[list[int], bool]] = []
    catch_up, level = SharedKVPredictor.catch_up, SharedKVPredictor.level

    def caught_up(self: Any, state: Any) -> None:
        rows[:] = [([*tokens], on) for tokens, on in zip(state.tokens, state.active)]
        catch_up(self, state)

    def answered(self: Any, frontier: Frontier) -> Tensor:
        logits = level(self, frontier)
        paths: list[list[list[int]]] = [[[]] for _ in rows]
        if frontier.depth:
            paths = [
                [above[parent] + [token] for parent, token in zip(parents, tokens)]
                for above, parents, tokens in zip(
                    seen[-1].paths, frontier.parents.tolist(), frontier.tokens.tolist()
                )
            ]
        seen.append(Asked([*rows], paths, logits.clone()))
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedKVPredictor, "catch_up", caught_up)
        patch.setattr(SharedKVPredictor, "level", answered)
        yield seen


class Oracle:
    """What an assistant's own forward says, one row at a time and without masks: it is given only
    the keys that it may see."""

    def __init__(self, model: Any, assistant: Any):
        self.model, self.assistant = model, assistant
        self.window = assistant.config.get_text_config().sliding_window
        self._known: dict[tuple[int, ...], Any] = {}

    def logits(self, tokens: list[int], path: list[int]) -> Tensor:
        output = self._prefix(tuple(tokens[:-1]))
        count = len(tokens) - 1
        firsts = {"full_attention": 0, "sliding_attention": max(count - self.window + 1, 0)}
        states = {
            kind: tuple(part[:, :, firsts[kind] : count] for part in output.shared_kv_states[kind])
            for kind in firsts
        }
        before, embed = output.hidden_states[-1][:, -1:], self.model.get_input_embeddings()
        for token in [tokens[-1], *path]:
            rows = torch.cat([embed(torch.tensor([[token]])), before], -1)
            found = self.assistant(
                inputs_embeds=rows, position_ids=torch.tensor([[count]]), shared_kv_states=states
            )
            before = found.last_hidden_state
        return found.logits[0, 0]

    def _prefix(self, tokens: tuple[int, ...]) -> Any:
        if tokens not in self._known:
            self._known[tokens] = self.model(
                torch.tensor([tokens]), use_cache=False, output_hidden_states=True,
                return_shared_kv_states=True,
            )  # fmt: skip
        return self._known[tokens]

    @torch.no_grad()
    def check(self, seen: list[Asked]) -> None:
        assert seen
        for asked in seen:
            for row, (tokens, active) in enumerate(asked.rows):
                for node, path in enumerate(asked.paths[row] if active else ()):
                    # fp32 with keys in another order of reduction, some layers deep.
                    torch.testing.assert_close(
                        asked.logits[row, node], self.logits(tokens, path), rtol=1e-3, atol=1e-3
                    )


def pair(name: str, ordered: bool = False) -> tuple[Any, Any]:
    return base_of(name), assistant_for(name, ordered)


@pytest.mark.parametrize(
    ("name", "setting", "given"),
    covering(
        [(name, setting, given) for name in BASES for setting in SETTINGS for given in GIVEN
         if (setting, given) != ("sampled", "batch")],  # which draws in another order
        lambda name, setting, given: [(name, given), (setting, given), (name, setting == "wide")],
    ),
)  # fmt: skip
def test_output_is_the_models_and_drafts_are_the_assistants(
    name: str, setting: str, given: str
) -> None:
    (model, assistant), (options, settings) = pair(name), SETTINGS[setting]
    spec = drafts(assistant, **{"max_depth": 3, **options})
    with watched() as seen:
        check_same(model, spec, **GIVEN[given], **{**GREEDY, **settings})
    stats = hf_spec.last_stats(model)
    assert stats.num_drafted_tokens > 0 and stats.num_draft_forwards == len(seen)
    if setting == "wide":
        assert stats.num_steps < 8
    Oracle(model, assistant).check(seen)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("name", "setting", "given", "way"),
    covering(
        [(name, setting, given, way) for name in ("gemma4_text", "shared") for setting in SETTINGS
         for given in GIVEN for way in range(2) if (setting, given) != ("sampled", "batch")],
        lambda name, setting, given, way: [
            (name, setting == "wide"), setting, (given, way), (setting == "penalty", way),
        ],
    ),
)  # fmt: skip
def test_recorded_steps_draft_the_same(name: str, setting: str, given: str, way: int) -> None:
    """The assistant is in the program of a step, or of the draft."""
    (model, assistant), (options, settings), stats = pair(name), SETTINGS[setting], []
    spec = drafts(assistant, **{"max_depth": 2, **options})
    for how in ({}, *[(RECORDED, CAPTURED)[way]] * 2):
        check_same(model, {**spec, **how}, **GIVEN[given], **{**GREEDY, **settings})
        stats.append(hf_spec.last_stats(model))
    eager, code = stats[0], stats[2].details["compiled"]
    assert code["made"] == 0 < code["runs"] and not code["refused"] and not code["outside"]
    for one in stats[1:]:
        assert one.accepted_histogram == eager.accepted_histogram
    assert eager.num_steps < 8 or setting != "wide"


@pytest.mark.usefixtures("recorded")
def test_an_assistant_that_records_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, assistant = pair("shared")
    monkeypatch.setattr(Graphs, "beside", lambda *_: None)
    spec = drafts(assistant, tree="chain", lookup=True, max_depth=1)
    check_same(model, {**spec, **RECORDED}, **GIVEN["row"])
    stats = hf_spec.last_stats(model)
    assert stats.details["compiled"]["outside"] in str(stats)
    assert "some ran without: the assistant is on another device" in str(stats)


@pytest.mark.parametrize("name", ["gemma4_text", "shared"])
def test_rows_that_finish_and_a_cache_that_goes_on(name: str) -> None:
    model, assistant = pair(name)
    spec = drafts(assistant, max_depth=2, width=2)
    plain = model.generate(**ragged(), **GREEDY)
    settings = {**GREEDY, "eos_token_id": int(plain[1, 15])}
    with watched() as seen:
        check_same(model, spec, **ragged(), **settings)
        assert len(seen[-1].rows) < 3
        check_continued(model, spec, **GREEDY)
    Oracle(model, assistant).check(seen)


def test_positions_that_the_caller_gives() -> None:
    """They count for rotations, and slots of the cache for windows, as in the model."""
    model, assistant = pair("gemma4_text")
    spec = drafts(assistant, max_depth=1)
    given = {"input_ids": prompt(), "position_ids": torch.arange(12)[None] + 7}
    with watched() as shifted:
        check_same(model, spec, **given, **GREEDY)
    with watched() as seen:
        model.generate(prompt(), **GREEDY, **spec)
    # Rotations tell distances only. fp32 at other angles.
    torch.testing.assert_close(shifted[0].logits, seen[0].logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", BASES)
@torch.no_grad()
def test_first_drafts_are_those_of_transformers(name: str, ordered: bool) -> None:
    """Later ones are not to be compared: Transformers' keys then end with one of a rejected token.
    Its windows reach two tokens further back, which a shorter prompt does not show."""
    model, assistant = pair(name, ordered)
    ids = prompt(model.config.get_text_config().sliding_window - 1)
    output = model(ids, output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
    rooted = torch.cat([ids, output.logits[:, -1:].argmax(-1)], dim=1)
    assistant.generation_config.num_assistant_tokens = 6
    stock: Any = StockGenerator(assistant, model.get_input_embeddings(), model.generation_config)
    stock.main_model_max_length = 100
    _, expected = stock.get_candidates(
        rooted, {"attention_mask": torch.ones_like(rooted)}, output, False, 0
    )
    with watched() as seen:
        model.generate(ids, **GREEDY, **drafts(assistant, tree="chain", max_depth=6))
    # fp32 with keys in another order of reduction, some layers deep.
    found = torch.cat([asked.logits for asked in seen[:6]], 1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_ordered_embeddings_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, assistant = pair("gemma4_text", ordered=True)
    level = SharedKVPredictor.level

    def without_reads(self: Any, frontier: Frontier) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "item", lambda _: pytest.fail("the host reads a tensor"))
            return level(self, frontier)

    monkeypatch.setattr(SharedKVPredictor, "level", without_reads)
    check_same(model, drafts(assistant, max_depth=2), **ragged(), **GREEDY)
    assert hf_spec.last_stats(model).num_draft_forwards > 0


def test_a_dtype_of_its_own() -> None:
    model = base_of("gemma4_text")
    assistant = assistant_for("gemma4_text", initializer_range=0.1).to(torch.bfloat16)
    check_same(model, drafts(assistant), **ragged())
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, assistant = pair("gemma4_text")

    def refused(model: Any, assistant: Any, match: str) -> None:
        with no_forward(model), pytest.raises(ValueError, match=match):
            model.generate(prompt(), **GREEDY, **drafts(assistant))

    name = "assistant_model=Gemma4AssistantForCausalLM"
    refused(shared("llama"), assistant, f"{name} is not one for this LlamaForCausalLM: there is "
            "no layer of type 'sliding_attention', .*'full_attention', .*Give the")  # fmt: skip
    other = assistant_for("gemma4_text", num_key_value_heads=1)
    refused(model, other, "this Gemma4ForCausalLM: it reads keys of 1 heads of 8 of type "
            "'sliding_attention', and these have of 2 heads of 8")  # fmt: skip
    wider = build("gemma4_text").config.to_dict() | {"hidden_size": 40}
    wide = random_model(config_class("gemma4_text")(**wider))
    refused(wide, assistant, "it reads states of size 32, and these have 40. Give")
    refused(model, copy.deepcopy(assistant).to("meta"), f"{name} has offloaded weights, .*onto one")
    with monkeypatch.context() as patch:
        patch.setattr(forwards, "tensor_parallel_size", lambda model: 2)
        refused(model, assistant, "each of the 2 processes that share the model holds a part")
    with monkeypatch.context() as patch:
        patch.delattr(type(assistant), "create_attention_masks")
        patch.delitem(vars(assistant), "create_attention_masks", raising=False)
        refused(model, assistant, "makes its masks in a way that is not known here")
