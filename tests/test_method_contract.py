"""What every strategy must do, whatever it is: found by discovery, nothing here names its inside.

Equality is token for token, in fp32 and fp64: a tiny random model's two best logits lie far apart
compared with rounding, so a single differing token is a bug.
"""

import dataclasses
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from adapter_oracle import as_in_papers, lent
from conftest import (
    ARCHITECTURES,
    CLOSE,
    EAGER_ONLY,
    POSITIONS,
    VOCAB,
    Tiny,
    check_same,
    prompt,
    ragged,
)
from covering import covering, pairs
from method_variants import VARIANTS, Variants
from naive_cache import row_of
from peft import PeftConfig
from running import drafting, needed
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import hf_spec
from hf_spec.adapters.layer import layers_of
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core import verify
from hf_spec.methods.registry import Method, methods
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.predict.network import LevelPredictor, NetworkPredictor
from hf_spec.predict.table import ProbePredictor, TablePredictor

#: What each method runs with; one without an entry runs its defaults.
RUNS = {name: VARIANTS.get(name, Variants({"default": {}})) for name in methods()}
CASES = [(name, variant) for name, run in RUNS.items() for variant in run.options]
IDS = ["-".join(case) for case in CASES]
#: One case per strategy, for what does not depend on its options.
FIRST = [next(case for case in CASES if case[0] == name) for name in methods()]
ADAPTERS = [name for name, method in methods().items() if method.adapter_config]

every_case = pytest.mark.parametrize(("name", "variant"), CASES, ids=IDS)
every_strategy = pytest.mark.parametrize(
    ("name", "variant"), FIRST, ids=[name for name, _ in FIRST]
)

NEW = 12


def options(name: str, variant: str) -> dict[str, Any]:
    return {**RUNS[name].options, **RUNS[name].sampled}[variant]


def strategy(name: str, variant: str) -> dict[str, Any]:
    """Every step drafts, so that what is compared is drafting."""
    return drafting(name, **options(name, variant))


@contextmanager
def adapted(model: PreTrainedModel, name: str, variant: str) -> Any:
    """The model with an adapter of the method's own, where it cannot run without one: an untrained
    one, or one of random parameters where the variant says what it has."""
    method, fields = methods()[name], RUNS[name].adapters.get(variant)
    if not method.needs_adapter:
        yield model
        return
    kind: Any = method.adapter_config
    fields_of = {**as_in_papers(kind), **(fields or {})}
    with lent(model, kind(**fields_of), random=fields is not None):
        yield model


def runs_on(name: str, architecture: str) -> bool:
    known = RUNS[name].architectures
    return known is None or architecture in known


def asks_for(name: str) -> str:
    """What a strategy asks of a model beside forwards of a tree."""
    drafter = methods()[name].declares
    if issubclass(drafter, ProbePredictor):
        return "probes"
    return "states" if issubclass(drafter, (LevelPredictor, TablePredictor)) else "tokens or layers"


def back_ends(architecture: str) -> list[str]:
    """The architecture's attention implementations, its default last."""
    return ["eager"] if architecture in EAGER_ONLY else ["eager", "sdpa"]


def inputs(row: int | None = None) -> dict[str, Any]:
    """The ragged batch, or one of its rows without padding."""
    batch = ragged()
    if row is None:
        return batch
    real = batch["attention_mask"][row].bool()
    return {key: value[row : row + 1, real] for key, value in batch.items()}


# -- options ---------------------------------------------------------------------------------


@every_strategy
def test_a_call_may_be_watched(tiny: Tiny, name: str, variant: str) -> None:
    """By hooks on all modules and modes that see each operation, also in training."""
    model, spec = tiny("llama"), strategy(name, variant)
    call = {**ragged(), "max_new_tokens": NEW // 2, "do_sample": False}
    with adapted(model, name, variant):
        for layer in layers_of(model):
            layer.requires_grad_(True)
        expected = model.generate(**call)
        with FlopCounterMode(display=False) as counter, torch.profiler.profile():
            found = model.generate(**call, **spec)
        assert torch.equal(found, expected) and counter.get_total_flops() > 0


@every_case
def test_options_round_trip(name: str, variant: str, tmp_path: Any) -> None:
    given = options(name, variant)
    method = methods()[name]
    full = dataclasses.asdict(method.parse_options(given))
    used = {key: value for key, value in full.items() if key in method.option_names}
    for kwargs in (given, used):
        config = hf_spec.SpecConfig(name, kwargs, max_new_tokens=7, temperature=0.5, do_sample=True)
        config.save_pretrained(tmp_path)
        ours = hf_spec.SpecConfig.from_pretrained(tmp_path)
        stock = GenerationConfig.from_pretrained(tmp_path)
        for loaded in (ours, stock):
            assert loaded.assistant_strategy == name
            assert loaded.assistant_kwargs == kwargs
            assert (loaded.max_new_tokens, loaded.temperature, loaded.do_sample) == (7, 0.5, True)
        assert type(ours) is hf_spec.SpecConfig
        assert dataclasses.asdict(method.parse_options(ours.assistant_kwargs)) == full


#: Fields that may be any text: a pattern of module names, the name of another strategy, a path.
TEXTS = {"target_modules", "draft_target_modules", "drafter", "adapter", "lookup_history"}


@pytest.mark.parametrize("name", methods())
def test_wrong_options_are_refused_by_name(name: str) -> None:
    """Each option, and each field of an adapter's config that PEFT's own do not have."""
    method = methods()[name]
    with pytest.raises(ValueError, match=rf"{name}.*no option 'no_such_option'.*drafting"):
        hf_spec.SpecConfig(name, {"no_such_option": 1})

    def parse(**given: Any) -> Any:
        return method.parse_options(given)

    makers: list[tuple[Any, Any]] = [(method.options, parse)]
    if method.adapter_config:
        makers.append((method.adapter_config, method.adapter_config))
    of_peft = {field.name for field in dataclasses.fields(PeftConfig)}
    for fields, make in makers:
        for field in {one.name for one in dataclasses.fields(fields)} - of_peft:
            for value in (["nonsense"] * (field not in TEXTS)) + [-1, float("nan"), object()]:
                with pytest.raises(ValueError, match=field):
                    make(**{field: value})


@pytest.mark.parametrize("name", methods())
def test_described(name: str) -> None:
    summary = hf_spec.strategies()[name]
    assert summary and "\n" not in summary and len(summary) <= 100
    assert methods()[name].options.__doc__


# -- greedy equality -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variant", "architecture", "attention", "row"),
    covering(
        [
            (*case, architecture, attention, row)
            for case in CASES
            for architecture in ARCHITECTURES
            for attention in back_ends(architecture)
            for row in (None, 1)
            # Options have nothing to do with the back end: one of them will do.
            if case in FIRST or attention == back_ends(architecture)[-1]
            if runs_on(case[0], architecture)
        ],
        # Each variant where drafts hit and miss, each strategy with each kind of positions, what
        # strategies ask of a model on each architecture. ``make test-all`` runs all of them.
        lambda name, variant, architecture, attention, row: [
            *pairs(name, attention, row),
            (architecture, attention),
            (asks_for(name), architecture),
            (name, POSITIONS.get(architecture)),
            (name, variant, architecture == "llama_tied" and row is None),
        ],
    ),
)
def test_greedy_equals_plain(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    variant: str,
    architecture: str,
    attention: str,
    row: int | None,
) -> None:
    """A ragged batch, left padded, or a row alone; the cache is checked on the way."""
    model = tiny(architecture, attention)
    steps = watch_cache_lengths(monkeypatch)
    with adapted(model, name, variant):
        spec = {**strategy(name, variant), "return_dict_in_generate": True}
        out = check_same(model, spec, **inputs(row), max_new_tokens=NEW)
        stats = hf_spec.last_stats(model)
        check_cache(model, out, inputs(row))
    assert steps
    if architecture == "llama_tied" and row is None:
        # The comparisons mean something: drafts hit and miss.
        hits = stats.num_generated_tokens - stats.num_row_steps
        assert stats.num_drafted_tokens > hits > 0 or not methods()[name].drafter.drafts


@every_strategy
def test_greedy_equals_plain_where_the_policy_decides(tiny: Tiny, name: str, variant: str) -> None:
    """As the option ``drafting`` is by default: which steps draft depends on what they take."""
    model, kwargs = tiny("llama"), options(name, variant)
    spec = {"assistant_strategy": name, "assistant_kwargs": kwargs, **needed(name)}
    with adapted(model, name, variant):
        for row in (None, 1):
            check_same(model, spec, **inputs(row), max_new_tokens=NEW)
            assert hf_spec.last_stats(model).details["policy"]["steps"]


@every_strategy
def test_greedy_equals_plain_in_fp64(tiny: Tiny, name: str, variant: str) -> None:
    model = tiny("gemma3", dtype=torch.float64)
    with adapted(model, name, variant):
        check_same(model, strategy(name, variant), **inputs(), max_new_tokens=NEW)


# -- the cache -------------------------------------------------------------------------------


def watch_cache_lengths(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """After every step each row's cache holds its tokens but the last; returns lengths seen."""
    seen: list[list[int]] = []
    make = Method.make_drafter

    def watched(self: Method, *args: Any) -> Any:
        drafter: Any = make(self, *args)
        observe = drafter.observe

        def checked(state: Any, draft: Any, counts: Any) -> None:
            expected = [len(tokens) - 1 for tokens in state.tokens]
            assert state.cache.host_lengths == expected
            assert state.cache.lengths.tolist() == expected
            assert state.cache.block is None
            seen.append(expected)
            observe(state, draft, counts)

        drafter.observe = checked
        return drafter

    monkeypatch.setattr(Method, "make_drafter", watched)
    return seen


def check_cache(model: PreTrainedModel, out: Any, given: dict[str, torch.Tensor]) -> None:
    """Every layer's keys and values are those of one plain forward over the accepted tokens."""
    cache = out[CACHE]
    assert isinstance(cache, TreeCache)
    width = given["input_ids"].shape[1]
    windows = [
        getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers
    ]
    for row, mask in enumerate(given["attention_mask"].bool()):
        tokens = torch.cat([given["input_ids"][row, mask], out.sequences[row, width:]])[:-1]
        assert cache.host_lengths[row] == len(tokens)
        alone = DynamicCache()
        with torch.no_grad():
            model(tokens[None], **{CACHE: alone}, use_cache=True)
        for index, (layer, window) in enumerate(zip(alone.layers, windows)):
            # A sliding layer keeps the last window - 1 tokens only.
            first = 0 if window is None else max(len(tokens) - (window - 1), 0)
            for ours, theirs in zip(row_of(cache, row, index), (layer.keys[0], layer.values[0])):
                torch.testing.assert_close(ours[:, first:], theirs[:, first:], **CLOSE)


# -- stock assisted decoding ------------------------------------------------------------------


@every_case
def test_candidates_for_stock_assisted_decoding(tiny: Tiny, name: str, variant: str) -> None:
    """A drafter is a ``CandidateGenerator``: the ids it is given, and a chain behind them."""
    model = tiny()
    method = methods()[name]
    with adapted(model, name, variant), torch.no_grad():
        parsed = method.parse_options(options(name, variant))
        drafter = method.make_drafter(model, parsed, needed(name).get("assistant_model"))
        ids = prompt()
        candidates, _ = drafter.get_candidates(ids)
        assert candidates.shape[0] == 1 and candidates.dtype == ids.dtype
        assert candidates[:, : ids.shape[1]].tolist() == ids.tolist()
        assert (candidates.shape[1] > ids.shape[1]) == drafter.drafts
        if isinstance(
            drafter.predictor, (TablePredictor, NetworkPredictor)
        ):  # others may guess it wrong
            assert candidates[0, ids.shape[1]] == model(ids).logits[0, -1].argmax()
        drafter.update_candidate_strategy(candidates, None, 0)


# -- sampling --------------------------------------------------------------------------------

WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7, "top_k": 0},
    "top_k": {"temperature": 3.0, "top_k": 3},
    "top_p": {"temperature": 2.0, "top_k": 0, "top_p": 0.7},
    "all": {"temperature": 2.5, "top_k": 4, "top_p": 0.9},
}
#: A processor that sees the tokens before, beside them.
SEEDED: dict[str, dict[str, Any]] = {
    **WARPERS, "top_k": {"temperature": 1.3, "top_k": 7, "repetition_penalty": 1.2}
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "variant", "architecture", "warper"),
    covering(
        [
            (*case, architecture, warper)
            for case in CASES
            for architecture in ("llama", "gemma3", "opt")
            for warper in WARPERS
            if runs_on(case[0], architecture)
        ],
        lambda name, variant, architecture, warper: [
            name, (asks_for(name), variant), (asks_for(name), architecture, warper),
        ],
    ),
)  # fmt: skip
def test_seeded_sampling_equals_plain(
    tiny: Tiny, name: str, variant: str, architecture: str, warper: str
) -> None:
    """The match rule draws once per emitted token, as plain generation does, in the same order."""
    model, settings = tiny(architecture), {**SEEDED[warper], "do_sample": True}
    with adapted(model, name, variant):
        check_same(model, strategy(name, variant), prompt(), **settings, max_new_tokens=NEW)


#: Sampling is restricted to these tokens, and the prompt consists of them: drafts always hit.
ALLOWED = (5, 17, 23, 42)
SAMPLES = 1000
#: Whose draft tokens, the likeliest of this model, are all among those that the test suppresses.
SUPPRESSED = {("token_recycling", "chain")}
#: A right program fails one of these tests with at most this probability; the seed is fixed, so it
#: can happen after a change of the program only.
FALSE_ALARM = 1e-6


@pytest.mark.parametrize(
    ("name", "variant", "warper"),
    covering(
        [
            (name, variant, warper)
            for name, variant in CASES
            for warper in WARPERS
            if variant == (RUNS[name].hitting or variant)
            and (RUNS[name].hitting or (name, variant) in FIRST or warper == "all")
        ]
        + [
            (name, variant, warper)
            for name, run in RUNS.items()
            for variant in run.sampled
            for warper in WARPERS
        ],
        # Each rule of acceptance with each warper, each way to draft and each sampled variant; one
        # call's draws are compared above.
        lambda name, variant, warper: [
            (name, variant) if (sampled := variant in RUNS[name].sampled) else asks_for(name),
            (sampled, warper),
        ],
    ),
)  # fmt: skip
def test_sampling_follows_the_plain_distribution(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, variant: str, warper: str
) -> None:
    """Chi-square of the first three tokens' joint distribution, 64 cells, against enumeration."""
    rules, rule = [], verify.rejection

    def noted(*args: Any) -> Any:
        rules.append("rejection")
        return rule(*args)

    monkeypatch.setattr(verify, "rejection", noted)
    model = tiny("llama_tied")
    ids = torch.tensor([ALLOWED + ALLOWED[::2] + ALLOWED[::-1] + ALLOWED[1::2] + ALLOWED[:2]])
    others = [token for token in range(VOCAB) if token not in ALLOWED]
    settings = {**WARPERS[warper], "do_sample": True, "suppress_tokens": others}
    expected = enumerate_three(model, ids, settings)
    torch.manual_seed(11)
    with adapted(model, name, variant):
        out = model.generate(
            ids, **settings, **strategy(name, variant),
            max_new_tokens=4, num_return_sequences=SAMPLES,
        )  # fmt: skip
    drawn = out[:, ids.shape[1] : ids.shape[1] + 3]
    place = torch.tensor([ALLOWED.index(t) if t in ALLOWED else -1 for t in range(VOCAB)])[drawn]
    assert (place >= 0).all()
    counts = torch.bincount((place * torch.tensor([16, 4, 1])).sum(1), minlength=64).double()
    stats = hf_spec.last_stats(model)
    drafts = methods()[name].drafter.drafts
    accepts = drafts and (name, variant) not in SUPPRESSED
    assert bool(stats.num_drafted_tokens) == drafts
    assert (stats.num_generated_tokens > stats.num_row_steps) == accepts
    assert chi_square(counts, expected) > FALSE_ALARM
    assert bool(rules) == (variant in RUNS[name].sampled)  # the rule that is meant


def enumerate_three(
    model: PreTrainedModel, ids: torch.Tensor, settings: dict[str, Any]
) -> torch.Tensor:
    """(64,) exact probabilities of the next three tokens under plain sampling."""
    first = torch.tensor(ALLOWED)
    grid = torch.cartesian_prod(first, first)  # (16, 2): all first two tokens
    rows = torch.cat([ids.expand(16, -1), grid], dim=1)
    width = ids.shape[1]
    chances = []
    for length in (width, width + 1, width + 2):
        # One plain step's processed scores.
        out = model.generate(
            rows[:, :length], **settings,
            max_new_tokens=1, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        chances.append(out.scores[0].double().softmax(-1)[:, list(ALLOWED)])  # (16, 4)
    two = chances[0][0, :, None] * chances[1][::4]  # (4, 4)
    return (two.reshape(16, 1) * chances[2]).flatten()


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """p-value; cells expecting fewer than 5 counts are put together, impossible ones are empty."""
    assert counts[expected == 0].sum() == 0, "drawn although impossible"
    expected = expected * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert len(expected) > 4
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor((len(expected) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(half, statistic / 2))


@pytest.mark.parametrize(
    ("name", "variant"), [(name, variant) for name, run in RUNS.items() for variant in run.sampled]
)
def test_sampled_drafts_carry_their_distribution(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, variant: str
) -> None:
    """It is what processors make of the drafts' scores; they see the tokens drafted before."""
    checked, step = [], methods()[name].drafter.step

    def watched(self: Any, state: Any, *given: Any) -> None:
        calls, process = [], state.process

        def spy(given: Any, suffixes: Any, active: Any, drafting: bool) -> Any:
            scores = process(given, suffixes, active, drafting)
            calls.append(([[int(token) for token in row] for row in suffixes], scores))
            return scores

        state.process = spy
        step(self, state, *given)
        state.process, tree = process, state.grown
        for place, (suffixes, scores) in enumerate(calls, start=1):
            assert suffixes == tree.tokens[:, 1:place].tolist()
            assert torch.equal(tree.q[:, place], scores.softmax(-1))
            assert (tree.q[:, place].gather(1, tree.tokens[:, place : place + 1]) > 0).all()
            checked.append(place)

    monkeypatch.setattr(methods()[name].drafter, "step", watched)
    model, more = tiny("gemma2"), {"do_sample": True, "top_k": 5, "no_repeat_ngram_size": 2}
    with adapted(model, name, variant):
        torch.manual_seed(0)
        model.generate(**ragged(), **more, max_new_tokens=8, **strategy(name, variant))
    assert len(checked) > 1


# -- adapters --------------------------------------------------------------------------------


def test_adapters_in_a_fresh_process(fresh: Tiny, tmp_path: Path) -> None:
    """Saved beside a SpecConfig and loaded elsewhere, each drafts what it drafted here."""
    fresh("llama").save_pretrained(tmp_path / "base")
    plain = fresh("llama").generate(prompt(), max_new_tokens=NEW, do_sample=False).tolist()
    here = {}
    for name in ADAPTERS:
        model = fresh("llama")
        torch.manual_seed(3)
        model.add_adapter(methods()[name].adapter_config())
        model.save_pretrained(tmp_path / name)
        # What is drafted must not depend on step times.
        always = {"drafting": "always"}
        config = hf_spec.SpecConfig(name, always, max_new_tokens=NEW, do_sample=False)
        config.save_pretrained(tmp_path / name)
        out = model.generate(prompt(), generation_config=config).tolist()
        assert out == plain
        here[name] = [out, hf_spec.last_stats(model).num_drafted_tokens]
    program = f"""
        import json, torch, hf_spec
        from transformers import AutoModelForCausalLM
        found = {{}}
        for name in {ADAPTERS}:
            model = AutoModelForCausalLM.from_pretrained("base")
            model.load_adapter(name)
            config = hf_spec.SpecConfig.from_pretrained(name)
            out = model.generate(torch.tensor({prompt().tolist()}), generation_config=config)
            found[name] = [out.tolist(), hf_spec.last_stats(model).num_drafted_tokens]
        print(json.dumps(found))
    """
    result = forks.run(program, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == here
