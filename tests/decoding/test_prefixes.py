"""Prompts that begin as ended calls do begin with their states."""

import random
from itertools import permutations
from typing import Any

import multimodal
import pytest
import torch
from adapter_oracle import lent
from architectures import build
from conftest import VOCAB, Tiny, check_same, prompt, shared
from peft import LoraConfig, get_peft_model
from recurrent_models import shared_recurrent
from running import drafting
from test_method_contract import FIRST, RUNS, adapted, strategy
from test_sharing import at_once, outcomes
from transformers import DynamicCache

import hf_spec
from hf_spec import StepSharing, last_stats, share_steps
from hf_spec.cache.tree_cache import TreeCache, take_over
from hf_spec.decoding.cache_reuse import LEAST, CacheOwner, Prefixes
from hf_spec.decoding.shared import SharedSteps
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.modules import CACHE

LOOKUP = drafting("prompt_lookup")
#: Tokens of the first prompt of a chat.
WIDTH = 24


@pytest.fixture
def model() -> Any:
    return shared("llama_tied")


def reused(model: Any) -> int:
    """Tokens of the last prompt that did not run."""
    return int(last_stats(model).details["shared"].get("reused", 0))


def next_turn(ids: torch.Tensor) -> torch.Tensor:
    """A chat, and what is asked next."""
    return torch.cat([ids, prompt(6, seed=5)], dim=1)


def chat(model: Any, spec: dict[str, Any], **settings: Any) -> list[int]:
    """The reused tokens of two turns of a chat, which are what plain generation gives; then of the
    same chat with another second question."""
    counts, ids = [], prompt(WIDTH)
    for _ in range(2):
        answer = check_same(model, spec, ids, **settings)
        counts.append(reused(model))
        first, ids = ids, next_turn(answer)
    check_same(model, spec, torch.cat([first[:, :-3], prompt(8, seed=9)], dim=1), **settings)
    return [*counts, reused(model)]


@pytest.mark.parametrize(("name", "variant"), FIRST, ids=[name for name, _ in FIRST])
def test_a_chat_goes_on_with_every_strategy(tiny: Tiny, name: str, variant: str) -> None:
    model = tiny("llama")
    with adapted(model, name, variant), share_steps(model):
        _, second, third = chat(model, strategy(name, variant))
    # All but the last token of the answer. Drafters that read the states of the whole prompt get
    # them from its forward.
    if second:
        assert second == WIDTH + 16 - 1 and third >= second
    else:
        assert name in ("eagle3", "mtp", "dflash", "dspark", "hydra") and not third


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "mistral"])
def test_windows_and_positions(architecture: str) -> None:
    """Of a window that has moved on, nothing is left that a shorter prompt could use."""
    with share_steps(model := shared(architecture)):
        chat(model, LOOKUP)


def test_a_prompt_that_sees_beyond_windows_runs_whole() -> None:
    """Moshi's cache slides, and its masks do not: in parts, a prompt has other states."""
    with share_steps(model := build("moshi")) as sharing:
        first = check_same(model, {**LOOKUP, "return_dict_in_generate": True}, prompt(WIDTH))
        ids = next_turn(first.sequences)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # answers have padding
        for _ in range(2):
            check_same(model, LOOKUP, **given)
            assert not reused(model)
            sharing.prompt_part = 4
            sharing._prompted.add(-1)  # as if another call took steps
    with pytest.raises(ValueError, match="MoshiForCausalLM runs a prompt without the windows"):
        model.generate(**given, **LOOKUP, **{CACHE: first[CACHE]})
    assert first[CACHE].host_lengths == [WIDTH + 16 - 1]


def test_samples(sharing: StepSharing, model: Any) -> None:
    assert chat(model, LOOKUP, do_sample=True, temperature=0.7)[1]


def test_what_depends_on_more_than_tokens_runs_whole() -> None:
    for model in (shared_recurrent("qwen3_5_text"), multimodal.build("qwen2_vl")):
        with share_steps(model):
            assert chat(model, LOOKUP)[1:] == [0, 0]


def test_a_batch_and_padding_run_whole(sharing: StepSharing, model: Any) -> None:
    check_same(model, LOOKUP, ids := prompt(WIDTH))
    for settings in (
        {"input_ids": ids.expand(2, -1)},
        {"input_ids": ids, "attention_mask": torch.tensor([[0] * 3 + [1] * (WIDTH - 3)])},
        {"input_ids": ids, "position_ids": torch.arange(2, WIDTH + 2)[None]},
    ):
        check_same(model, LOOKUP, **settings)
        assert not reused(model)


def test_a_returned_cache_is_the_callers(sharing: StepSharing, model: Any) -> None:
    first = check_same(model, {**LOOKUP, "return_dict_in_generate": True}, prompt(WIDTH))
    first[CACHE].states.tensors()[0].zero_()  # which the caller may do
    check_same(model, LOOKUP, next_turn(first.sequences))
    assert reused(model)
    assert sharing.prefix_tokens == WIDTH + 16 + 6 + 16 - 1


def test_long_rests_run_in_parts(
    sharing: StepSharing, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same(model, LOOKUP, ids := prompt(WIDTH))
    monkeypatch.setattr(sharing, "prompt_part", 4)
    sharing._prompted.add(-1)  # as if another call took steps
    check_same(model, LOOKUP, torch.cat([ids, prompt(30, seed=4)], dim=1))
    assert reused(model) == WIDTH


# -- what a model's weights have computed ----------------------------------------------------------


def test_changed_weights_compute_anew(fresh: Tiny) -> None:
    model = fresh("llama")
    weight = model.get_input_embeddings().weight
    with share_steps(model):
        for change in (lambda: weight.data.mul_(1.5), lambda: weight.detach().neg_()):
            check_same(model, LOOKUP, ids := prompt(WIDTH))
            check_same(model, LOOKUP, next_turn(ids))
            assert reused(model)
            change()
            check_same(model, LOOKUP, next_turn(ids))
            assert not reused(model)


def test_other_adapters_compute_anew(fresh: Tiny) -> None:
    model = fresh("llama")
    for name in ("one", "two"):
        config = LoraConfig(init_lora_weights=False, target_modules=["q_proj", "v_proj"])
        model.add_adapter(config, name)
    with share_steps(model):
        for name in ("one", "two"):
            model.set_adapter(name)
            check_same(model, LOOKUP, ids := prompt(WIDTH))
            assert not reused(model)
            check_same(model, LOOKUP, next_turn(ids))
            assert reused(model)


def test_other_inputs_compute_anew(fresh: Tiny) -> None:
    """A setting that each forward gets, and PEFT's adapter of each row."""
    model = fresh("llama")

    class Shifted(type(model)):  # type: ignore[misc]
        def forward(
            self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None,
            past_key_values: Any = None, cache: Any = None, shift: int = 0, **others: Any,
        ) -> Any:  # fmt: skip
            others |= {"attention_mask": attention_mask, "position_ids": position_ids}
            others[CACHE] = past_key_values if cache is None else cache
            return super().forward(input_ids=(input_ids + shift) % VOCAB, **others)

    with share_steps(model):
        model.__class__ = Shifted
        for shift in (3, 5, 3):
            check_same(model, LOOKUP, ids := prompt(WIDTH), shift=shift)
            check_same(model, LOOKUP, next_turn(ids), shift=shift)
            assert not reused(model)
        model.__class__ = Shifted.__base__
        config = LoraConfig(init_lora_weights=False, target_modules=["q_proj", "v_proj"])
        peft = get_peft_model(model, config, "one")
        peft.add_adapter("two", config)
        peft.eval()
        for name in ("one", "two", "one"):
            check_same(peft, LOOKUP, input_ids=ids, adapter_names=[name])
            check_same(peft, LOOKUP, input_ids=next_turn(ids), adapter_names=[name])
            assert not reused(model)


# -- what is kept ----------------------------------------------------------------------------------


def made(tokens: list[int]) -> TreeCache:
    """A cache of one sequence, whose states are its tokens."""
    source, cache = DynamicCache(), TreeCache(1, 1, "cpu")
    states = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)
    source.update(states, states, 0)
    take_over(cache, source)
    cache.tokens = [tokens]
    return cache


def test_the_longest_beginning_of_what_was_used_last() -> None:
    """Beside all tokens of all calls, in the order in which they were used."""
    rng, kept = random.Random(0), Prefixes(8 * LEAST)
    known: list[list[int]] = []
    hits = 0
    for _ in range(300):
        begin = rng.choice([*known, []])
        tokens = begin[: rng.randint(0, len(begin))]
        tokens = tokens + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2 * LEAST))]

        def common(other: list[int], tokens: list[int] = tokens) -> int:
            most = min(len(tokens) - 1, len(other))
            return next((i for i in range(most) if tokens[i] != other[i]), most)

        longest = max(map(common, known), default=0)
        found = kept.longest(tokens)
        assert (found is not None) == (longest >= LEAST)
        if found is not None:
            best = next(one for one in known if common(one) == longest)
            known.remove(best)
            known.append(best)
            assert found.tokens == [best] and found.host_lengths == [len(best)]
            assert found.layers[0].keys.flatten().tolist()[: len(best)] == best
            hits += 1
        kept.keep(made(tokens))
        if LEAST <= len(tokens) <= kept.most:
            known = [one for one in known if one != tokens[: len(one)]] + [tokens]
        while sum(map(len, known)) > kept.most:
            del known[0]
        assert kept.num_tokens == sum(map(len, known))
    assert hits > 50
    kept.clear()
    assert not kept.num_tokens and kept.longest(tokens) is None


def test_nothing_is_kept_where_memory_is_short(
    sharing: StepSharing, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same(model, LOOKUP, ids := prompt(WIDTH))
    assert sharing.prefix_tokens

    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(SharedSteps, "take", short)
        model.generate(next_turn(ids), do_sample=False, **LOOKUP)
    assert not sharing.prefix_tokens
    assert chat(model, LOOKUP)[1] == WIDTH + 16 - 1


def test_an_answer_needs_no_memory_for_what_is_kept(
    sharing: StepSharing, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError

    check_same(model, LOOKUP, ids := prompt(WIDTH))
    with monkeypatch.context() as patch:
        patch.setattr(TreeCache, "copied", short)
        check_same(model, LOOKUP, prompt(WIDTH, seed=2))
        check_same(model, LOOKUP, ids, max_new_tokens=1)  # whose steps are not shared
        assert not sharing.prefix_tokens
        with pytest.raises(torch.OutOfMemoryError):
            model.generate(ids, do_sample=False, return_dict_in_generate=True, **LOOKUP)
    check_same(model, LOOKUP, next_turn(ids))


@pytest.mark.parametrize("most", [0, WIDTH])
def test_a_limit(model: Any, most: int) -> None:
    with share_steps(model, max_prefix_tokens=most):
        assert chat(model, LOOKUP) == [0, 0, 0]


def test_a_wrong_limit(model: Any) -> None:
    with pytest.raises(ValueError, match="max_prefix_tokens"):
        hf_spec.share_steps(model, max_prefix_tokens=-1)


@pytest.mark.parametrize(("name", "variant"), [("bita", "deep"), ("ppd", "prefix")])
def test_strategies_go_on_with_each_others(
    tiny: Tiny, name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside rows that have, or have not, learned keys and values in front."""
    model, fields = tiny("llama"), RUNS[name].configs[variant]
    config = methods()[name].adapter_config(**fields)
    with lent(model, config, random=True), share_steps(model) as sharing:
        found: list[bool] = []
        begin = CacheOwner.begin_with_kept
        monkeypatch.setattr(
            CacheOwner, "begin_with_kept", lambda self: found.append(begin(self)) or found[-1]
        )
        specs = [drafting(name), LOOKUP]
        for seed, (spec, other) in enumerate(permutations(specs)):
            check_same(model, spec, ids := prompt(WIDTH, seed=seed + 20))
            made: list[dict[str, Any]] = [
                {"inputs": one, "do_sample": False, "max_new_tokens": 16}
                for one in (next_turn(ids), prompt(WIDTH, seed=seed + 40), next_turn(ids))
            ]
            wanted = [model.generate(**one).tolist() for one in made]
            with at_once(sharing, model, [{**one, **other} for one in made]) as calls:
                assert outcomes(calls) == wanted
            assert found[-3:] == [True, False, True]
