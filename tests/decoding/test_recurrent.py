"""Models with recurrent layers: what ``generate`` gives with a strategy equals plain generation."""

import copy
import os
import random
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from conftest import check_same, prompt, ragged
from covering import EVERY_CASE, covering
from processors import Criterion, Failure
from recurrent_models import CONFIGS, KINDS, recurrent, shared_recurrent
from running import CAPTURED, drafting
from test_after_errors import lines, once_each
from test_shrinking import StopRowAt
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList

import hf_spec
from hf_spec.cache import recurrent as recurrent_module
from hf_spec.cache.recurrent import stock_states
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.methods.registry import methods
from hf_spec.policy.step_policy import StepPolicy
from modeling_patches.cache_name import CACHE
from modeling_patches.support import empty_cache

NEW = 16
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
LOOKUP = drafting("prompt_lookup")
#: Everything drafted is accepted, so that an error of drafting shows as a rejection.
SAME_MODEL = drafting(
    "layer_skip", skip_attention=[], skip_mlp=[], draft_exit="fixed", max_draft=4
)  # fmt: skip
#: Each strategy with fields of its adapter and its options.
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompt_lookup": ({}, {}),
    "layer_skip": ({}, {"skip_attention": [0, 2], "skip_mlp": [], "max_draft": 3}),
    "medusa": ({"num_heads": 3}, {}),
    "eagle3": ({"draft_vocab_size": 40}, {"max_depth": 3}),
    "dflash": ({"num_layers": 1}, {}),
    "dspark": ({"num_layers": 1, "markov_rank": 4}, {"tree": "chain"}),
    "ppd": ({"num_ept": 2, "num_prompt_tokens": 3}, {}),
    "bita": ({"num_mask_tokens": 3, "prompt_depth": "none"}, {}),
    "space": ({"num_mask_tokens": 3}, {}),
    "propd": ({"num_heads": 3, "prune_layer": 2}, {}),
}

every_kind = pytest.mark.parametrize("kind", KINDS)


def one_row() -> dict[str, Tensor]:
    return {"input_ids": prompt(12)}


@cache
def plain(kind: str, rows: int) -> list[list[int]]:
    given = one_row() if rows == 1 else ragged()
    return shared_recurrent(kind).generate(**given, **GREEDY).tolist()


def check(kind: str, model: Any = None, **settings: Any) -> None:
    model = model or shared_recurrent(kind)
    for rows, given in ((1, one_row()), (3, ragged())):
        assert model.generate(**given, **GREEDY, **settings).tolist() == plain(kind, rows)


# -- strategies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted({*CONFIGS} - {*KINDS}))
def test_every_architecture(kind: str) -> None:
    """But for those that all tests below run."""
    model = shared_recurrent(kind)
    found = model.generate(**ragged(), **GREEDY, **LOOKUP)
    assert found.tolist() == plain(kind, 3)
    stats = hf_spec.last_stats(model)
    assert stats is not None and stats.num_drafted_tokens > 20


@every_kind
def test_drafting_with_the_whole_model(kind: str) -> None:
    model = shared_recurrent(kind)
    found = model.generate(**ragged(), **GREEDY, **SAME_MODEL)
    assert found.tolist() == plain(kind, 3)
    stats = hf_spec.last_stats(model)
    assert stats is not None and min(stats.acceptance_per_position) > 0.95


@pytest.mark.parametrize(
    ("kind", "name"), covering(product(KINDS, STRATEGIES), lambda kind, name: [kind, name])
)
def test_every_strategy(kind: str, name: str) -> None:
    model = shared_recurrent(kind) if name in ("prompt_lookup", "layer_skip") else recurrent(kind)
    fields, options = STRATEGIES[name]
    with_adapter(model, name, fields)
    check(kind, model, **drafting(name, **options))
    stats = hf_spec.last_stats(model)
    assert stats is not None and stats.num_drafted_tokens > 20


def test_pruning_is_refused() -> None:
    model = with_adapter(recurrent("qwen3_5_text"), "propd", {"num_heads": 2})
    with pytest.raises(ValueError, match="prune=True: Qwen3_5ForCausalLM has recurrent layers"):
        model.generate(**one_row(), **GREEDY, **drafting("propd", prune=True))


def with_adapter(model: Any, name: str, fields: dict[str, Any]) -> Any:
    """The model with an adapter of random parameters, where the strategy needs one."""
    method = methods()[name]
    if method.needs_adapter:
        torch.manual_seed(2)
        model.add_adapter(method.adapter_config(**fields))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.2)
    return model.eval()


def test_learned_states_beside_recurrent_ones() -> None:
    """Where every layer has keys, too."""
    model = with_adapter(recurrent("falcon_h1"), "bita", {"num_mask_tokens": 3})
    check("falcon_h1", model, **drafting("bita"))


#: Two layers of each kind, each of which takes its time in a graph.
TWO_LAYERS: dict[str, dict[str, Any]] = {
    "mamba": {}, "lfm3": {"layer_types": ["conv", "sliding_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip


@pytest.mark.usefixtures("sizes_as_shipped")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *product(["mamba", "lfm3"], ["prompt_lookup"]),
        ("qwen3_5_text", "space"), ("qwen3_5_text", "layer_skip"),
    ],
)  # fmt: skip
def test_compiled(kind: str, name: str) -> None:
    """Also where a forward of ours updates the state, with probes and with skipped layers."""
    model = recurrent(kind, num_hidden_layers=2, **TWO_LAYERS[kind])
    with_adapter(model, name, STRATEGIES[name][0])
    # Trees of few sizes, each of which is a graph.
    options = {
        "prompt_lookup": {"max_depth": 2, "max_nodes": 3}, "space": {"num_draft_tokens": 3},
        "layer_skip": {"skip_attention": [0], "skip_mlp": [], "max_draft": 2},
    }[name]  # fmt: skip
    given = ragged() if kind in ("mamba", "lfm3") else one_row()
    check_same(model, {**drafting(name, **options), **CAPTURED}, **given, **GREEDY)
    stats = hf_spec.last_stats(model)
    assert stats is not None and stats.num_drafted_tokens
    found = stats.details["compiled"]
    # For each size of trees the forward, and what drafts after it; also those after the first step
    # read states of one layout.
    assert not found["refused"] and 0 < found["made"] <= 5


# -- plain steps ---------------------------------------------------------------------------------


@every_kind
def test_plain_steps_are_those_of_plain_generation(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: layers run their own code. Of hybrid models in the first layer, as attention
    with a mask is another function."""
    model = shared_recurrent(kind)
    monkeypatch.setattr(StepPolicy, "drafts", lambda self, lookups: False)
    settings = {**GREEDY, "return_dict_in_generate": True}
    for given in (one_row(), {"input_ids": prompt(12, 3)}):
        past = model.generate(**given, **settings)[CACHE]
        cache = model.generate(**given, **settings, **LOOKUP)[CACHE]
        theirs, ours = dict(stock_states(past.layers)), dict(cache.recurrent.states())
        places = [place for place in theirs if kind == "mamba" or place[1] == 0]
        assert places and all(torch.equal(ours[place], theirs[place]) for place in places)


# -- caches --------------------------------------------------------------------------------------


def stops(ids: Tensor, *ends: int) -> StoppingCriteriaList:
    """Ends rows after so many tokens."""
    rows = [tuple(row) for row in ids.tolist()]
    return StoppingCriteriaList([StopRowAt(ids.shape[1], dict(zip(rows, ends)))])


def states_of(model: Any, tokens: list[int]) -> dict[Any, Tensor]:
    """What Transformers computes from these tokens alone."""
    alone = empty_cache(model)
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=True, **{CACHE: alone})
    return {place: state[0] for place, state in stock_states(alone.layers)}


def check_close(found: Tensor, wanted: Tensor) -> None:
    """Up to fp32's rounding in other orders of reduction, some layers deep over a conversation."""
    assert float((found - wanted).norm() / wanted.norm().clamp(min=1e-3)) < 1e-4


def check_states(model: Any, cache: TreeCache, sequences: list[list[int]]) -> None:
    """The cache holds the start of each row."""
    assert cache.recurrent is not None and cache.tokens is not None
    assert cache.recurrent.snapshot.lengths == cache.host_lengths
    for row, (tokens, length) in enumerate(zip(cache.tokens, cache.host_lengths)):
        assert tokens == sequences[row][:length] and len(tokens) == length
        if not length:
            continue
        wanted = states_of(model, tokens)
        for place, state in cache.recurrent.states():
            check_close(state[row], wanted[place])


def real(out: Tensor, given: dict[str, Tensor]) -> list[list[int]]:
    padding = (1 - given["attention_mask"]).sum(-1).tolist()
    return [row[count:] for row, count in zip(out.tolist(), padding)]


@every_kind
def test_tree_cache_over_turns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops in the middle of a path; then more of the conversation, in one chunk or several."""
    model, given = shared_recurrent(kind), ragged()
    settings = {**GREEDY, "return_dict_in_generate": True}
    for spec in (LOOKUP, SAME_MODEL):
        first = model.generate(
            **given, **settings, **spec, stopping_criteria=stops(given["input_ids"], 13, 15, 11)
        )
        check_states(model, first[CACHE], real(first.sequences, given))
        sequences = first.sequences[:, : 12 + 11]  # what all rows have
        ids = torch.cat([sequences, prompt(9, 3, seed=50)], 1)
        mask = torch.cat([given["attention_mask"], torch.ones(3, 11 + 9).long()], 1)
        turn = {"input_ids": ids, "attention_mask": mask}
        wanted = model.generate(**turn, **GREEDY).tolist()
        second = model.generate(**turn, **settings, **spec, **{CACHE: first[CACHE]})
        assert second.sequences.tolist() == wanted
        assert second[CACHE] is first[CACHE]
        check_states(model, second[CACHE], real(second.sequences, turn))
        monkeypatch.setattr("hf_spec.model.appending.RECURRENT_CHUNK", 4)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        *product(["qwen3_5_text", "kimi_linear", "falcon_h1", "lfm3", "zamba2"], [SAME_MODEL]),
        ("lfm2", LOOKUP), ("qwen3_5_text", LOOKUP),
    ],
)  # fmt: skip
def test_dynamic_cache_is_filled_as_by_plain_generation(kind: str, spec: dict[str, Any]) -> None:
    """Also where the row ends within a step."""
    model = shared_recurrent(kind)
    for given, ends in ((one_row(), None), (one_row(), (13,))):
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        for past, strategy in zip(caches, ({}, spec)):
            stop = None if ends is None else stops(given["input_ids"], *ends)
            out = model.generate(
                **given, **GREEDY, **strategy, stopping_criteria=stop, **{CACHE: past}
            )  # fmt: skip
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == out.shape[1] - 1
        theirs, ours = (dict(stock_states(past.layers)) for past in caches)
        assert theirs.keys() == ours.keys()
        for place, state in theirs.items():
            check_close(ours[place], state)
        mine, other = (
            [getattr(layer, "has_previous_state", None) for layer in past.layers]
            for past in (caches[1], caches[0])
        )
        assert mine == other
        # The next turn, plain and with a strategy.
        ids = torch.cat([out, prompt(6, seed=50)], 1)
        turn = {"input_ids": ids, **GREEDY, "max_new_tokens": 12}
        wanted = model.generate(**turn, **{CACHE: caches[0]}).tolist()
        for after in ({}, LOOKUP):
            found = model.generate(**turn, **after, **{CACHE: copy.deepcopy(caches[1])})
            assert found.tolist() == wanted


@every_kind
def test_padding_between_tokens(kind: str) -> None:
    """Changes the states in plain generation: a prompt is computed as there, a TreeCache does not
    go on, and where windows count the padding nothing does."""
    model, given = shared_recurrent(kind), {"input_ids": prompt(12, 2)}
    given["attention_mask"] = torch.tensor([[1] * 12, [1] * 4 + [0] * 3 + [1] * 5])
    refused = pytest.raises(ValueError, match=r"between the tokens of rows \[1\]: .*side by side")
    settings = {**GREEDY, **LOOKUP, "return_dict_in_generate": True}
    if kind == "lfm3":
        with refused:
            model.generate(**given, **settings)
    else:
        out = model.generate(**given, **settings)
        assert out.sequences.tolist() == model.generate(**given, **GREEDY).tolist()
        with pytest.raises(ValueError, match="padding between the tokens of their prompt"):
            ids = torch.cat([out.sequences, prompt(4, 2)], 1)
            more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            model.generate(**more, **settings, **{CACHE: out[CACHE]})
    whole = model.generate(prompt(6, 2), **settings)[CACHE]
    with refused:
        model.generate(**given, **settings, **{CACHE: whole})


def test_prompts_in_which_transformers_loses_a_state() -> None:
    """It begins anew in each forward of several tokens; tokens are then those of plain generation,
    which a TreeCache does not repeat."""
    model = shared_recurrent("jamba")
    parts = {**one_row(), **GREEDY, "prefill_chunk_size": 5}
    wanted = model.generate(**parts).tolist()
    assert wanted != plain("jamba", 1)
    assert model.generate(**parts, **LOOKUP).tolist() == wanted
    pasts = [DynamicCache(config=model.config) for _ in range(2)]
    for past in pasts:
        out = model.generate(**one_row(), **GREEDY, **{CACHE: past})
    ids = torch.cat([out, prompt(6, seed=50)], 1)
    wanted = model.generate(ids, **GREEDY, **{CACHE: pasts[0]}).tolist()
    assert model.generate(ids, **GREEDY, **LOOKUP, **{CACHE: pasts[1]}).tolist() == wanted


@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba"])
def test_after_an_error(kind: str) -> None:
    """The start of each row; a call goes on from it."""
    model, given = shared_recurrent(kind), ragged()
    settings = {**GREEDY, "return_dict_in_generate": True}
    first = model.generate(**given, **{**settings, "max_new_tokens": 8}, **LOOKUP)
    ids = torch.cat([first.sequences, prompt(5, 3, seed=50)], 1)
    mask = torch.cat([given["attention_mask"], torch.ones(3, 13).long()], 1)
    turn = {"input_ids": ids, "attention_mask": mask}
    wanted = model.generate(**turn, **GREEDY)
    for spec, at in ((LOOKUP, 1), (LOOKUP, 9), (SAME_MODEL, 4)):
        past = copy.deepcopy(first[CACHE])
        with pytest.raises(Failure):
            criterion = StoppingCriteriaList([Criterion(at)])
            model.generate(**turn, **GREEDY, **spec, stopping_criteria=criterion, **{CACHE: past})
        check_states(model, past, real(wanted, turn))
        assert model.generate(**turn, **GREEDY, **spec, **{CACHE: past}).tolist() == (
            wanted.tolist()
        )  # fmt: skip


@pytest.mark.parametrize("given", ["dynamic", "tree"])
def test_an_interrupt_at_any_line(given: str) -> None:
    """At some lines, those of the states among them."""
    model, settings = shared_recurrent("falcon_h1"), {**GREEDY, "max_new_tokens": 8}
    before: Any = DynamicCache(config=model.config)
    own = {} if given == "tree" else {CACHE: before}
    rows = 2 if given == "tree" else 1
    ids = prompt(9, rows)
    out = model.generate(
        ids, **settings, **SAME_MODEL, **own, return_dict_in_generate=True
    )  # fmt: skip
    before, ids = out[CACHE], torch.cat([out.sequences, prompt(5, rows, seed=50)], 1)
    wanted = model.generate(ids, **settings, stopping_criteria=stops(ids, *(8, 5)[:rows])).tolist()
    caches: list[Any] = []

    def call() -> None:
        stop = stops(ids, *(8, 5)[:rows])
        model.generate(
            ids, **settings, **SAME_MODEL, stopping_criteria=stop, **{CACHE: caches[-1]}
        )  # fmt: skip

    def begin_anew() -> None:
        caches.append(copy.deepcopy(before))

    begin_anew()
    call()
    begin_anew()
    passed = lines(call)
    numbers = once_each(passed)
    ours = [n for n in numbers if passed[n][0] == recurrent_module.__file__]
    others = [n for n in numbers if n not in ours]
    rng = random.Random(given)
    if not os.environ.get(EVERY_CASE):
        ours, others = rng.sample(ours, 12), rng.sample(others, 6)
    for number in ours + others:
        begin_anew()
        with pytest.raises(KeyboardInterrupt):
            lines(call, number)
        cache = caches.pop()
        try:
            check_start(model, cache, wanted)
        except Exception as error:
            error.add_note(f"after an interrupt at {passed[number]}, number {number}")
            raise


def check_start(model: Any, cache: Any, sequences: list[list[int]]) -> None:
    """All of a cache is of the same tokens, from the start of each row."""
    if isinstance(cache, TreeCache):
        assert cache.tokens is None or all(
            row == wanted[: len(row)] for row, wanted in zip(cache.tokens, sequences)
        )
        cache.tokens = [row[:n] for row, n in zip(sequences, cache.host_lengths)]
        check_states(model, cache, sequences)
        return
    states, length = dict(stock_states(cache.layers)), cache.layers[0].keys.shape[2]
    for row, tokens in enumerate(sequences):
        wanted = states_of(model, tokens[:length])
        for place, state in states.items():
            check_close(state[row], wanted[place])
