"""How far predictions and the noise of sampling are to be trusted."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from adapter_oracle import randomise
from conftest import VOCAB, Tiny
from fake_clock import FakeClock
from running import draft_everything
from torch import Tensor

import hf_spec
from hf_spec.core import memory
from hf_spec.drafting.draft_vocabulary import places_of
from hf_spec.drafting.noise import SamplingNoise
from hf_spec.drafting.predictions import Predictions, Tempered
from hf_spec.drafting.tempering import OFTEN, SHARE, SHARPNESS, Sample, Tempering
from hf_spec.methods.registry import get_method

TRUE = torch.tensor([True])


def gumbel(*shape: int, generator: torch.Generator) -> Tensor:
    return -torch.empty(*shape).exponential_(generator=generator).log()


@pytest.mark.parametrize(("sharpness", "share"), [(0.5, 0.9), (1.2, 0.3), (0.8, 0.6)])
def test_both_numbers_are_found(sharpness: float, share: float) -> None:
    """Tokens drawn from the distribution that Tempering assumes."""
    generator = torch.Generator().manual_seed(0)
    learned = Tempering()
    for _ in range(600):
        logits, noise = (
            torch.randn(4, 12, generator=generator) * 3,
            gumbel(4, 12, generator=generator),
        )
        chances = (sharpness * logits + share * noise).softmax(-1)
        tokens = torch.multinomial(chances, 1, generator=generator)[:, 0]
        learned.learn(logits, noise, tokens, torch.ones(4, dtype=torch.bool))
    # The last steps are of 0.02 in logarithms, divided by what is left of their slope.
    assert learned.sharpness == pytest.approx(sharpness, rel=0.2)
    assert learned.share == pytest.approx(share, rel=0.2)
    assert learned.updates == 600


def test_a_step_goes_up_the_likelihood() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        logits, noise = torch.randn(3, 9, generator=generator), gumbel(3, 9, generator=generator)
        tokens = torch.randint(9, (3,), generator=generator)
        valid = torch.tensor([True, False, True])
        numbers = torch.tensor([1.0, 0.6], requires_grad=True)
        score = (numbers[0] * logits + numbers[1] * noise).log_softmax(-1)
        score.gather(1, tokens[:, None])[valid].mean().backward()
        learned = Tempering()
        learned.learn(logits, noise, tokens, valid)
        moved = torch.tensor([learned.sharpness - 1.0, learned.share - 0.6])
        assert numbers.grad is not None
        assert moved.sign().tolist() == numbers.grad.sign().tolist()


def test_nothing_is_learned_from_nothing() -> None:
    learned, logits = Tempering(), torch.randn(2, 5)
    learned.learn(logits, logits, torch.tensor([1, 2]), torch.tensor([False, False]))
    assert learned == Tempering()
    learned.learn(torch.full((1, 5), torch.inf), torch.zeros(1, 5), torch.tensor([1]), TRUE)
    assert (learned.sharpness, learned.share) == (1.0, 0.6)  # no slope


def test_both_numbers_stay_within_bounds() -> None:
    logits, noise = torch.tensor([[5.0, 0.0]]), torch.tensor([[0.0, 5.0]])
    learned, seen = Tempering(), []
    for token in [0] * 200 + [1] * 400:
        learned.learn(logits, noise, torch.tensor([token]), TRUE)
        seen.append((learned.sharpness, learned.share))
    for values, (low, high) in zip(zip(*seen), (SHARPNESS, SHARE)):
        assert low <= min(values) < max(values) == high
    assert min(seen)[0] == SHARPNESS[0]


class Plus:
    """A Markov head: a bias for each pair of tokens."""

    def __init__(self, table: Tensor):
        self.table = table

    def bias(self, previous: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
        rows = self.table[previous]  # (batch, distances, n, vocab)
        index = tokens[:, :, None].expand(-1, -1, previous.shape[2], -1)
        return rows.gather(-1, index)


@pytest.mark.parametrize("with_markov_head", [False, True])
def test_tempered_predictions(with_markov_head: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 3, 11, generator=generator).double()
    table = torch.randn(11, 11, generator=generator).double()
    noise = gumbel(2, 3, 11, generator=generator).double()
    previous = torch.randint(11, (2, 3, 1), generator=generator)
    markov_head: Any = Plus(table) if with_markov_head else None
    found = Predictions(
        logits, 11, (3, 3), markov_head, logits, None, Tempered(torch.tensor(0.7), noise)
    )
    given = logits + (table[previous[..., 0]] if with_markov_head else 0.0)
    expected = (0.7 * given + noise).log_softmax(-1).gather(-1, found.tokens)
    torch.testing.assert_close(found.given(previous)[:, :, 0], expected, rtol=1e-5, atol=1e-5)


#: Layer whose MLP is left out of drafts.
SKIPPED = 1
CASES = {"medusa": {}, "ppd": {"draft_vocab_size": VOCAB // 2}}


@pytest.fixture
def model(fresh: Tiny, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its forwards all take the same time, and those without the last MLP none."""
    found, clock = fresh("llama_tied"), FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)

    def turn(*args: Any) -> None:
        clock.now += 1.0

    found.model.layers[SKIPPED].mlp.register_forward_pre_hook(turn)
    return found


@pytest.fixture(params=CASES)
def drafting(request: Any, model: Any) -> tuple[Any, str]:
    """A model with an adapter that has a Markov head."""
    name = request.param
    config = get_method(name).adapter_config(markov_rank=4, **CASES[name])
    model.add_adapter(config, adapter_name="one")
    randomise(model, name.upper())
    return model, name


def drafter_of(model: Any, name: str) -> Any:
    method = get_method(name)
    return method.make_drafter(model, method.parse_options({}))


@torch.no_grad()
def test_logits_given_the_tokens_before(drafting: tuple[Any, str]) -> None:
    """As those at tokens of a finished sequence, which ``make_dynamic_tree`` measures."""
    drafter = drafter_of(*drafting)
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))
    places = torch.tensor([2, 4, 5])
    depth = drafter.distances
    expected = torch.cat(list(drafter.future_logits(ids, places)))
    seen = torch.cat(list(drafter.future_states(ids, places)))
    drafter.states = lambda seen, depth: seen
    previous = torch.stack([ids[0, place + 1 : place + 1 + depth] for place in places])
    found = drafter.given(seen, previous)
    if drafter.vocabulary is not None:
        expected = expected[..., drafter.vocabulary.tokens]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # float32, other order


class Copying:
    """Predicts at distance d the token of number ``seen + d``, with certainty."""

    token_ids: Any = None

    def given(self, seen: Tensor, previous: Tensor) -> Tensor:
        self.previous = previous
        at = seen[:, None] + torch.arange(1, 1 + previous.shape[1])
        return torch.nn.functional.one_hot(at, 9).float()


class Noted(Tempering):
    def learn(self, logits: Tensor, noise: Tensor, tokens: Tensor, valid: Tensor, ids: Any) -> None:
        place, known = places_of(tokens, ids)
        valid = valid & known
        self.told = logits.argmax(-1)[valid].tolist(), place[valid].tolist(), noise.shape


@pytest.mark.parametrize("ids", [None, [1, 2, 3, 5, 6, 7]])
def test_what_is_learned_from(ids: Sequence[int] | None) -> None:
    """All distances that a sequence has reached and that were predicted, of drafted tokens."""
    drafter: Any = Copying()
    if ids is not None:
        drafter.token_ids = torch.tensor(ids)
    noise = torch.zeros(3, 3, 9)
    sample = Sample(drafter, torch.tensor([0, 3, 1]), torch.tensor([7, 7, 8]), (3, 2, 3), noise)
    noted = Noted()
    sample.teach(noted, [[1, 2, 4, 8], [4, 5, 6], []])
    assert drafter.previous[0].tolist()[0] == 7
    expected, came, shape = noted.told
    assert shape == (3, 3, 9)
    if ids is None:
        assert came == [1, 2, 4, 4, 5] and expected == [1, 2, 3, 4, 5]
        assert drafter.previous.tolist()[:2] == [[7, 1, 2], [7, 4, 5]]
    else:  # places in the vocabulary; 4 is not in it
        assert came == [0, 1, 3] and expected == [1, 2, 5]


SAMPLED: dict[str, Any] = {
    "do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 40, "eos_token_id": None,
}  # fmt: skip


def prompts(rows: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (rows, 9), generator=torch.Generator().manual_seed(6))


def call(model: Any, name: str, settings: dict[str, Any], rows: int = 1, **kwargs: Any) -> Tensor:
    torch.manual_seed(4)
    out: Tensor = model.generate(
        prompts(rows), **settings, assistant_strategy=name, assistant_kwargs=kwargs
    )
    return out


def tempering(model: Any) -> Tempering:
    learned = memory.memory(model)["learned"].values()
    (found,) = (one for one in learned if isinstance(one, Tempering))
    return found


def test_sampled_calls_teach_it(drafting: tuple[Any, str]) -> None:
    model, name = drafting
    call(model, name, {**SAMPLED, "do_sample": False})
    assert tempering(model) == Tempering()
    call(model, name, SAMPLED)
    after = tempering(model).updates
    assert 0 < after <= SAMPLED["max_new_tokens"] // OFTEN
    exact = call(model, name, SAMPLED, num_draft_tokens=4)
    assert tempering(model).updates == after  # ... nor is it used
    assert torch.equal(exact, call(model, name, SAMPLED, num_draft_tokens=4))
    call(model, name, SAMPLED, rows=3)
    assert tempering(model).updates > after


def skipping() -> dict[str, Any]:
    return {"skip_attention": [], "skip_mlp": [SKIPPED], "lookup": False}


def test_drafts_of_layer_skip_teach_it(model: Any) -> None:
    call(model, "layer_skip", SAMPLED, **skipping())
    assert tempering(model).updates > 0


def test_the_noise_raises_acceptance(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without one of its MLPs samples nearly as the whole one does, and what the whole one
    samples from so flat a distribution is hardly ever the likeliest token."""
    draft_everything(monkeypatch)
    options, rows = {**skipping(), "max_draft": 6}, 3
    texts = call(model, "layer_skip", SAMPLED, rows, **options).tolist()
    knowing = hf_spec.last_stats(model).mean_accepted_tokens
    memory.forget(model)
    ahead = SamplingNoise.ahead
    monkeypatch.setattr(SamplingNoise, "ahead", lambda *args, **kwargs: 0 * ahead(*args, **kwargs))
    assert call(model, "layer_skip", SAMPLED, rows, **options).tolist() == texts
    assert knowing > 1.4 * hf_spec.last_stats(model).mean_accepted_tokens
