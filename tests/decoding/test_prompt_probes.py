"""Probes under the prompt's last token: the first step behind it has candidates."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from adapter_oracle import lent
from conftest import ARCHITECTURES, CLOSE, POSITIONS, Tiny, check_same, plainly, prompt, ragged
from covering import covering
from running import drafting
from transformers import DynamicCache, GenerationMixin

import hf_spec.decoding.prefill as module
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.drafting.probe_drafter import ProbeDrafter
from hf_spec.methods.registry import get_method
from hf_spec.model.sequences import probe_sequences
from modeling_patches.cache_name import CACHE
from modeling_patches.modules import decoder_layers
from modeling_patches.positions import needs_positions

NAMES = ("bita", "space", "ppd")
#: Full attention, sliding windows, both, learned positions, ALiBi.
KINDS = ("llama", "mistral", "gemma3", "gpt2", "bloom")
GREEDY = {"max_new_tokens": 16, "do_sample": False}


def adapted(model: Any, name: str) -> AbstractContextManager[None]:
    """The model with an adapter of random parameters, so that all of them matter."""
    config: Any = get_method(name).adapter_config
    return lent(model, config(), random=True)


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[int], Any]]:
    """The drafter, the known probes per row and their states, of each call's first proposal."""
    found: list[tuple[Any, list[int], Any]] = []
    propose = ProbeDrafter.propose

    def noted(self: ProbeDrafter, state: Any) -> Any:
        if state.stats.num_steps == 1:
            counts = [count * self.per_distance for count in self.num_predicted]
            found.append((self, counts, self.hidden))
        return propose(self, state)

    monkeypatch.setattr(ProbeDrafter, "propose", noted)
    return found


@contextmanager
def forwards(model: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Rows of each forward, and rows that logits were made of."""
    rows: list[int] = []
    logits: list[int] = []
    hooks = [
        decoder_layers(model)[0].register_forward_pre_hook(
            lambda m, args, kwargs: rows.append([*args, *kwargs.values()][0].shape[1]),
            with_kwargs=True,
        ),
        model.get_output_embeddings().register_forward_pre_hook(
            lambda m, args: logits.append(args[0].shape[1])
        ),
    ]
    try:
        yield rows, logits
    finally:
        for hook in hooks:
            hook.remove()


def oracle(model: Any, drafter: ProbeDrafter, ids: torch.Tensor) -> torch.Tensor:
    """States of probes under the last of these tokens, ``(group, hidden)``, run behind them."""
    last = torch.tensor([[len(ids) - 1]])
    made = probe_sequences(model, ids[None], None, last, drafter.group, drafter.probe_inputs)
    return made.probe_hidden[0, 0]


@pytest.mark.parametrize(
    ("name", "architecture"),
    covering(
        product(NAMES, ARCHITECTURES),
        lambda name, architecture: [architecture, (name, POSITIONS.get(architecture))],
    ),
)
def test_probes_see_each_rows_prompt(
    tiny: Tiny, first: list[Any], name: str, architecture: str
) -> None:
    """In one forward, padding or not, also where a sliding window is shorter than the prompt."""
    model = tiny(architecture)
    batch = ragged((12, 5, 9))
    expected = plainly(model, **batch, **GREEDY)
    with adapted(model, name):
        with forwards(model) as (rows, logits):
            out = model.generate(**batch, **GREEDY, **drafting(name))
        assert out.tolist() == expected.tolist()
        [(drafter, counts, hidden)] = first
        group = len(drafter.group)
        if needs_positions(model):  # attention is not the model's own
            assert rows[0] == 12 and counts == [0] * 3 and hidden is None
            return
        assert rows[0] == 12 + group and logits[0] == 1
        assert counts == [group] * 3
        for row, ids in enumerate(batch["input_ids"]):
            wanted = oracle(model, drafter, ids[batch["attention_mask"][row].bool()])
            torch.testing.assert_close(hidden[row], wanted, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_has_candidates(
    fresh: Tiny, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A step less, where the model always says the same, so that all guesses are right."""
    model = fresh("phi")
    model.lm_head.weight.data.zero_()
    model.lm_head.bias.data = torch.eye(len(model.lm_head.bias))[7]
    with adapted(model, name):
        calls = []
        for riding in (512, 0):
            monkeypatch.setattr(module, "RIDING", riding)
            out = model.generate(
                prompt(), max_new_tokens=17, do_sample=False, **drafting(name),
                return_dict_in_generate=True,
            )  # fmt: skip
            assert out.sequences[0, 12:].tolist() == [7] * 17
            calls.append(out.spec_stats)
    assert calls[0].num_steps == calls[1].num_steps - 1
    assert calls[0].mean_accepted_tokens > calls[1].mean_accepted_tokens


@pytest.mark.parametrize("architecture", KINDS)
def test_the_callers_cache_is_as_after_a_stock_prefill(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    model = tiny(architecture)
    with adapted(model, "bita"):
        given = {**ragged(), **GREEDY, **drafting("bita"), "return_dict_in_generate": True}
        caches = []
        for riding in (512, 0):
            monkeypatch.setattr(module, "RIDING", riding)
            caches.append(DynamicCache(config=model.config))
            assert model.generate(**given, **{CACHE: caches[-1]})[CACHE] is caches[-1]
    for mine, theirs in zip(*(cache.layers for cache in caches)):
        assert type(mine) is type(theirs)
        torch.testing.assert_close(mine.keys, theirs.keys, **CLOSE)
        torch.testing.assert_close(mine.values, theirs.values, **CLOSE)


@pytest.mark.parametrize(
    ("architecture", "chunk"), [*product(("llama", "gemma3"), (256, 4)), ("gpt2", 4), ("bloom", 4)]
)
def test_a_continued_cache(
    tiny: Tiny, first: list[Any], monkeypatch: pytest.MonkeyPatch, architecture: str, chunk: int
) -> None:
    """Rows with other numbers of new tokens, so that they end in other chunks."""
    monkeypatch.setattr("hf_spec.model.appending.CHUNK", chunk)
    model, batch = tiny(architecture), ragged((12, 5, 9))
    with adapted(model, "bita"):
        cache = model.generate(**batch, **GREEDY, **drafting("bita"), return_dict_in_generate=True)[
            CACHE
        ]
        assert isinstance(cache, TreeCache) and cache.tokens is not None
        # The first row parts with the cache early, the others go on.
        rows = [cache.tokens[0][:6], *cache.tokens[1:]]
        rows = [row + prompt(size, seed=5)[0].tolist() for row, size in zip(rows, (13, 3, 5))]
        width = max(map(len, rows))
        given = {
            "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
            "attention_mask": torch.tensor(
                [[0] * (width - len(row)) + [1] * len(row) for row in rows]
            ),
        }
        first.clear()
        with forwards(model) as (_, logits):
            out = model.generate(**given, **GREEDY, **drafting("bita"), **{CACHE: cache})
        assert logits[0] == 1
        assert out.tolist() == model.generate(**given, **GREEDY).tolist()
        [(drafter, counts, hidden)] = first
        assert counts == [len(drafter.group)] * 3
        for row, ids in enumerate(rows):
            wanted = oracle(model, drafter, torch.tensor(ids))
            torch.testing.assert_close(hidden[row], wanted, **CLOSE)


def test_rows_that_end_with_the_first_token(tiny: Tiny, first: list[Any]) -> None:
    model, batch = tiny("llama"), ragged((12, 5, 9))
    ends = model.generate(**batch, max_new_tokens=1, do_sample=False)[0, -1].item()
    settings = {**GREEDY, "eos_token_id": ends}
    with adapted(model, "space"):
        check_same(model, drafting("space"), **batch, **settings)
        check_same(model, drafting("space"), **batch, max_new_tokens=1)


def with_tokens(model: Any) -> dict[str, Any]:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt()[:, :5], **{CACHE: cache})
    return {CACHE: cache}


#: What makes a prompt special.
SPECIAL: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "long": ("llama", lambda model: {"input_ids": prompt(module.RIDING + 1)}),
    "embeddings": (
        "llama", lambda model: {"inputs_embeds": model.get_input_embeddings()(prompt())}
    ),
    "positions": ("llama", lambda model: {"position_ids": torch.arange(3, 15)[None]}),
    "chunks": ("llama", lambda model: {"prefill_chunk_size": 5}),
    "a cache with tokens": ("llama", with_tokens),
    "a cache without layers": ("llama", lambda model: {CACHE: DynamicCache()}),
    "other inputs": ("mixtral", lambda model: {"output_router_logits": False}),
}  # fmt: skip


@pytest.mark.parametrize("case", SPECIAL)
def test_special_prompts_run_as_in_plain_generation(
    tiny: Tiny, first: list[Any], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(module, "RIDING", 20)
    architecture, special = SPECIAL[case]
    check_stock(tiny(architecture), first, special)


def check_stock(model: Any, first: list[Any], special: Callable[[Any], dict[str, Any]]) -> None:
    def given() -> dict[str, Any]:
        return {"input_ids": prompt(), **special(model)}

    expected = model.generate(**given(), **GREEDY)
    with adapted(model, "space"):
        out = model.generate(**given(), **GREEDY, **drafting("space"))
    assert out.tolist() == expected.tolist()
    assert first[-1][1] == [0] and first[-1][2] is None


def test_special_models_run_as_in_plain_generation(
    fresh: Tiny, first: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefills of their own; rotary frequencies that follow the length; attention without masks."""
    own = fresh("llama")

    class Own(type(own)):  # type: ignore[misc]
        def _prefill(self, *args: Any, **kwargs: Any) -> Any:
            return GenerationMixin._prefill(self, *args, **kwargs)

    own.__class__ = Own
    check_stock(own, first, lambda model: {})
    with monkeypatch.context() as patch:
        patch.setattr(module, "followers", lambda model: [model])
        patch.setattr(module, "reach_of", lambda *args: None)
        check_stock(fresh("llama"), first, lambda model: {})
    with monkeypatch.context() as patch:
        # As a model with flash attention says it, which does not run everywhere.
        patch.setattr(module, "TAKES_MASKS", ())
        check_stock(fresh("llama"), first, lambda model: {})
