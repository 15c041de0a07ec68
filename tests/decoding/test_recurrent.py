"""Models with recurrent layers: what ``generate`` gives with a strategy equals plain generation."""

import copy
import os
import random
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from conftest import check_same, plainly, prompt, ragged
from covering import EVERY_CASE, covering
from processors import Criterion, Failure
from recurrent_models import CONFIGS, KINDS, recurrent, shared_recurrent
from running import CAPTURED, drafting
from test_after_errors import lines, once_each
from test_shrinking import stops
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList

import hf_spec
from hf_spec.cache import recurrent as recurrent_module
from hf_spec.cache.recurrent import stock_states
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.draft.policy import StepPolicy
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches import per_call
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.modeling_patches.support import empty_cache

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
RETURN = {"return_dict_in_generate": True}
RETURNED: dict[str, Any] = {**GREEDY, **RETURN}
LOOKUP = drafting("prompt_lookup")
#: Everything drafted is accepted, so that an error of drafting shows as a rejection.
SAME_MODEL = drafting(
    "layer_skip", skip_attention=[], skip_mlp=[], draft_exit="fixed", num_draft_tokens=4
)  # fmt: skip
#: Each strategy with fields of its adapter and its options.
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompt_lookup": ({}, {}),
    "layer_skip": ({}, {"skip_attention": [0, 2], "skip_mlp": [], "num_draft_tokens": 3}),
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


def next_turn(given: dict[str, Tensor], answered: Tensor, new: int) -> dict[str, Tensor]:
    """The prompt of so many tokens behind an answered one."""
    ids = torch.cat([answered, prompt(new, len(answered), seed=50)], 1)
    mask = given["attention_mask"]
    return {
        "input_ids": ids,
        "attention_mask": torch.cat([mask, torch.ones_like(ids[:, mask.shape[1] :])], 1),
    }


# -- strategies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "spec"),
    [*product(sorted({*CONFIGS} - {*KINDS}), [LOOKUP]), *product(KINDS, [SAME_MODEL])],
)
def test_every_architecture(kind: str, spec: dict[str, Any]) -> None:
    """Those that all tests below run with lookups draft with the whole model."""
    model = shared_recurrent(kind)
    check_same(model, spec, **ragged())
    stats: Any = hf_spec.last_stats(model)
    assert stats.num_drafted_tokens > 20
    assert spec is LOOKUP or min(stats.acceptance_per_position) > 0.95


@pytest.mark.parametrize(
    ("kind", "name"), covering(product(KINDS, STRATEGIES), lambda kind, name: [kind, name])
)
def test_every_strategy(kind: str, name: str) -> None:
    model = shared_recurrent(kind) if name in ("prompt_lookup", "layer_skip") else recurrent(kind)
    fields, options = STRATEGIES[name]
    with_adapter(model, name, fields)
    for given in (one_row(), ragged()):
        check_same(model, drafting(name, **options), **given)
    stats: Any = hf_spec.last_stats(model)
    assert stats.num_drafted_tokens > 20


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
    for given in (one_row(), ragged()):
        check_same(model, drafting("bita"), **given)


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
        "prompt_lookup": {"max_depth": 2, "num_draft_tokens": 3}, "space": {"num_draft_tokens": 3},
        "layer_skip": {"skip_attention": [0], "skip_mlp": [], "num_draft_tokens": 2},
    }[name]  # fmt: skip
    given = ragged() if kind in ("mamba", "lfm3") else one_row()
    check_same(model, {**drafting(name, **options), **CAPTURED}, **given)
    stats: Any = hf_spec.last_stats(model)
    found = stats.details["compiled"]
    # For each size of trees the forward, and what drafts after it; also those after the first step
    # read states of one layout.
    assert stats.num_drafted_tokens and not found["refused"] and 0 < found["made"] <= 5


# -- plain steps ---------------------------------------------------------------------------------


@every_kind
def test_plain_steps_are_those_of_plain_generation(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: layers run their own code. Of hybrid models in the first layer, as attention
    with a mask is another function."""
    model = shared_recurrent(kind)
    monkeypatch.setattr(StepPolicy, "wants_draft", lambda self, lookups: False)
    for given in (one_row(), {"input_ids": prompt(12, 3)}):
        past = model.generate(**given, **RETURNED)[CACHE]
        cache = model.generate(**given, **RETURNED, **LOOKUP)[CACHE]
        theirs, ours = dict(stock_states(past.layers)), dict(cache.recurrent.states())
        places = [place for place in theirs if kind == "mamba" or place[1] == 0]
        assert places and all(torch.equal(ours[place], theirs[place]) for place in places)


# -- caches --------------------------------------------------------------------------------------


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
    for spec in (LOOKUP, SAME_MODEL):
        first = model.generate(
            **given, **RETURNED, **spec, stopping_criteria=stops(given["input_ids"], 13, 15, 11)
        )
        cache = first[CACHE]
        check_states(model, cache, real(first.sequences, given))
        turn = next_turn(given, first.sequences[:, : 12 + 11], 9)  # what all rows have
        second = check_same(model, {**spec, **RETURN, CACHE: cache}, **turn)
        assert second[CACHE] is cache
        check_states(model, cache, real(second.sequences, turn))
        monkeypatch.setattr("hf_spec.target.target.RECURRENT_CHUNK", 4)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        *product(["qwen3_5_text", "kimi_linear", "falcon_h1", "lfm3", "zamba2"], [SAME_MODEL]),
        ("lfm2", LOOKUP), ("qwen3_5_text", LOOKUP),
    ],
)  # fmt: skip
def test_dynamic_cache_is_filled_as_by_plain_generation(kind: str, spec: dict[str, Any]) -> None:
    """Also where the row ends within a step."""
    model, given = shared_recurrent(kind), one_row()
    for stop in (None, stops(given["input_ids"], 13)):
        plain, ours = (DynamicCache(config=model.config) for _ in range(2))
        for past, strategy in ((plain, {}), (ours, spec)):
            out = model.generate(
                **given, **GREEDY, **strategy, stopping_criteria=stop, **{CACHE: past}
            )  # fmt: skip
        assert plain.get_seq_length() == ours.get_seq_length() == out.shape[1] - 1
        wanted, found = (dict(stock_states(past.layers)) for past in (plain, ours))
        assert wanted.keys() == found.keys()
        for place, state in wanted.items():
            check_close(found[place], state)
        for mine, theirs in zip(ours.layers, plain.layers):
            name = "has_previous_state"
            assert getattr(mine, name, None) == getattr(theirs, name, None)
        # The next turn, plain and with a strategy.
        turn = {"input_ids": torch.cat([out, prompt(6, seed=50)], 1), **GREEDY}
        expected = model.generate(**turn, **{CACHE: plain}).tolist()
        for after in ({}, LOOKUP):
            again = model.generate(**turn, **after, **{CACHE: copy.deepcopy(ours)})
            assert again.tolist() == expected


@every_kind
def test_padding_between_tokens(kind: str) -> None:
    """Changes the states in plain generation: a prompt is computed as there, a TreeCache does not
    go on, and where windows count the padding nothing does."""
    model, given = shared_recurrent(kind), {"input_ids": prompt(12, 2)}
    given["attention_mask"] = torch.tensor([[1] * 12, [1] * 4 + [0] * 3 + [1] * 5])
    refused = pytest.raises(ValueError, match=r"between the tokens of rows \[1\]: .*side by side")
    settings = {**RETURNED, **LOOKUP}
    if kind == "lfm3":
        with refused:
            model.generate(**given, **settings)
    else:
        out = check_same(model, {**LOOKUP, **RETURN}, **given)
        with pytest.raises(ValueError, match="padding between the tokens of their prompt"):
            more = torch.cat([out.sequences, prompt(4, 2)], 1)
            seen = {"attention_mask": torch.ones_like(more), CACHE: out[CACHE]}
            model.generate(more, **settings, **seen)
    whole = model.generate(prompt(6, 2), **settings)[CACHE]
    with refused:
        model.generate(**given, **settings, **{CACHE: whole})


def test_prompts_in_which_transformers_loses_a_state() -> None:
    """It begins anew in each forward of several tokens; tokens are then those of plain generation,
    which a TreeCache does not repeat."""
    model, parts = shared_recurrent("jamba"), {**one_row(), "prefill_chunk_size": 5}
    found = check_same(model, LOOKUP, **parts)
    assert not torch.equal(found, plainly(model, **one_row(), **GREEDY))
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
    first = model.generate(**given, **{**RETURNED, "max_new_tokens": 8}, **LOOKUP)
    turn = next_turn(given, first.sequences, 5)
    for spec, at in ((LOOKUP, 1), (LOOKUP, 9), (SAME_MODEL, 4)):
        past = copy.deepcopy(first[CACHE])
        with pytest.raises(Failure):
            criterion = StoppingCriteriaList([Criterion(at)])
            model.generate(**turn, **GREEDY, **spec, stopping_criteria=criterion, **{CACHE: past})
        check_states(model, past, real(plainly(model, **turn, **GREEDY), turn))
        check_same(model, {**spec, CACHE: past}, **turn)


@pytest.mark.parametrize("given", ["dynamic", "tree"])
def test_an_interrupt_at_any_line(given: str) -> None:
    """At some lines, those of the states among them."""
    model, settings = shared_recurrent("falcon_h1"), {**RETURNED, "max_new_tokens": 8}
    own, rows = ({}, 2) if given == "tree" else ({CACHE: DynamicCache(config=model.config)}, 1)
    out = model.generate(prompt(9, rows), **settings, **SAME_MODEL, **own)
    before, ids = out[CACHE], torch.cat([out.sequences, prompt(5, rows, seed=50)], 1)
    settings["stopping_criteria"] = stops(ids, *(8, 5)[:rows])
    wanted = model.generate(ids, **settings).sequences.tolist()

    def call(cache: Any) -> Any:
        return partial(model.generate, ids, **settings, **SAME_MODEL, **{CACHE: cache})

    call(copy.deepcopy(before))()
    passed = lines(call(copy.deepcopy(before)))
    numbers = once_each(passed)
    ours = [n for n in numbers if passed[n][0] == recurrent_module.__file__]
    others = [n for n in numbers if n not in ours]
    if given == "dynamic":
        # The prompt's forward over this cache is Transformers' own. Interrupted where it asks us
        # for a function, it leaves layers at different tokens, as in plain generation.
        others = [n for n in others if passed[n][0] != per_call.__file__]
    rng = random.Random(given)
    if not os.environ.get(EVERY_CASE):
        ours, others = rng.sample(ours, 12), rng.sample(others, 6)
    for number in ours + others:
        cache = copy.deepcopy(before)
        with pytest.raises(KeyboardInterrupt):
            lines(call(cache), number)
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
