"""The random numbers of sampling, against ``torch.multinomial`` and plain ``generate``."""

from typing import Any

import pytest
import torch
from adapter_oracle import lent
from conftest import Tiny, prompt
from running import default_dtype, drafting
from torch import Tensor

import hf_spec
from hf_spec.target.noise import REMEMBERED, SamplingNoise

CPU = torch.device("cpu")


def scores(rows: int, vocab: int = 50, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator).mul(2)


def multinomial(given: Tensor, count: int, seed: int) -> list[int]:
    """``count`` draws in turn."""
    torch.manual_seed(seed)
    return [int(torch.multinomial(given.softmax(-1), 1)) for _ in range(count)]


@pytest.mark.parametrize("vocab", [2, 50, 5000])
@pytest.mark.parametrize(("seen", "default"), [(0, torch.float32), (3, torch.bfloat16)])
def test_one_sequence_draws_what_multinomial_draws(
    vocab: int, seen: int, default: torch.dtype
) -> None:
    given = scores(1, vocab)
    expected = multinomial(given, 20, seed=7)
    torch.manual_seed(7)
    noise, found = SamplingNoise(1, CPU), []
    with default_dtype(default):
        for count in [1, 3, 2, 1, 4, 1, 3, 2, 3]:  # tokens of a step
            for ahead in range(count):
                found.append(int(noise.choose(given, ahead)))
            noise.advance([count])
            if seen:
                noise.ahead(seen)
    assert found == expected and noise.drawn(1).dtype == torch.float32


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_a_drafter_that_knows_logits_and_the_noise_knows_the_token(temperature: float) -> None:
    """A temperature scales what is added to logits."""
    noise = SamplingNoise(3, CPU, temperature)
    noise.choose(scores(3), 0)
    noise.advance([1, 1, 1])
    for step in range(30):
        given = scores(3, seed=step)
        gumbel = noise.ahead(4)
        assert gumbel.shape == (3, 4, 50)
        for ahead in range(3):
            expected = (given + gumbel[:, ahead]).argmax(-1)
            assert noise.choose(given / temperature, ahead).tolist() == expected.tolist()
        noise.advance([1, 2, 3])


def test_rows_draw_what_they_draw_whatever_the_others_do() -> None:
    given = scores(1).expand(3, -1)

    def run(counts: list[list[int]], order: list[int]) -> dict[int, list[int]]:
        torch.manual_seed(3)
        noise, found = SamplingNoise(3, CPU), {row: [] for row in range(3)}
        rows = [0, 1, 2]
        for step, row_counts in enumerate(counts):
            if step == 2:
                noise.select(order)
                rows = [rows[place] for place in order]
            live = [row_counts[row] for row in rows]
            for ahead in range(max(live)):
                chosen = noise.choose(given[rows], ahead).tolist()
                for row, token, count in zip(rows, chosen, live):
                    if ahead < count:
                        found[row].append(token)
            noise.advance(live)
        return found

    one = run([[1, 1, 1], [1, 2, 3], [2, 1, 1], [1, 1, 1]], [0, 1, 2])
    other = run([[1, 3, 1], [3, 1, 1], [1, 1, 1], [0, 3, 3]], [2, 1])
    for row in range(3):
        shorter = min(len(one[row]), len(other[row]))
        assert shorter >= 4 and one[row][:shorter] == other[row][:shorter]
    assert len({tuple(tokens) for tokens in one.values()}) == 3  # rows differ


def test_rows_that_join_keep_their_numbers_and_temperatures() -> None:
    def both() -> list[SamplingNoise]:
        noises = [SamplingNoise(2, CPU, seeds=[1, 2]), SamplingNoise(1, CPU, 0.5, seeds=[3])]
        for noise in noises:
            noise.choose(scores(len(noise.rows)), 0)
        return noises

    parts, (noise, other) = both(), both()
    noise.join(other)
    for counts in ([1, 2, 1], [0, 1, 3]):
        alone = torch.cat([part.ahead(4) for part in parts])
        assert torch.equal(noise.ahead(4), alone)
        assert torch.equal(noise.scaled(torch.ones(3, 2))[:, 0], torch.tensor([1, 1, 0.5]))
        for part, own in zip((noise, *parts), (counts, counts[:2], counts[2:])):
            part.advance(own)
    noise.select([2, 0])
    assert torch.equal(noise.ahead(4), torch.cat([part.ahead(4) for part in parts])[[2, 0]])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_probabilities_that_are_not_finite(value: float) -> None:
    given = scores(2)
    given[1, 3] = value
    first, second = SamplingNoise(2, CPU).choose(given, 0).tolist()
    assert first >= 0 and second == -1
    assert SamplingNoise(2, CPU).choose(given, 0, rows=[0]).tolist()[1] == 0


def test_noise_of_some_tokens_and_after_some() -> None:
    noise, some = SamplingNoise(3, CPU), torch.tensor([4, 40, 7])
    noise.choose(scores(3), 0)
    whole = noise.ahead(8)
    assert torch.equal(noise.ahead(8, some), whole[:, :, some])
    counts = [2, 0, 4]
    noise.advance(counts)
    for row, count in enumerate(counts):
        assert torch.equal(noise.ahead(3)[row], whole[row, count : count + 3])


def drawn_ahead(used: int) -> SamplingNoise:
    noise = SamplingNoise(1, CPU)
    for _ in range(used):
        noise.choose(scores(1), 0)
        noise.ahead(4)
        noise.advance([1])
    return noise


@pytest.mark.parametrize("used", [1, 5, 2 * REMEMBERED])
def test_draws_that_were_not_needed_are_given_back(used: int) -> None:
    multinomial(scores(1), used, seed=2)
    expected = torch.get_rng_state()
    torch.manual_seed(2)
    noise = drawn_ahead(used)
    assert not torch.equal(torch.get_rng_state(), expected)
    noise.give_back(used)
    assert torch.equal(torch.get_rng_state(), expected)


def test_nothing_is_given_back_once_something_else_has_drawn() -> None:
    noise = drawn_ahead(3)
    torch.rand(1)
    before = torch.get_rng_state()
    noise.give_back(3)
    assert torch.equal(torch.get_rng_state(), before)
    between = drawn_ahead(3)
    torch.rand(1)  # and then the call draws on
    between.ahead(8)
    before = torch.get_rng_state()
    between.give_back(3)
    assert torch.equal(torch.get_rng_state(), before)


SAMPLED: dict[str, Any] = {
    "do_sample": True, "temperature": 1.3, "top_p": 0.9, "max_new_tokens": 24,
}  # fmt: skip


#: Strategies that draft few tokens and many.
FEW, MANY = (drafting("medusa", num_draft_tokens=count) for count in (2, 8))


@pytest.fixture
def model(tiny: Tiny) -> Any:
    found = tiny("llama_tied")
    with lent(found, hf_spec.MedusaConfig(num_heads=3), random=False):
        yield found


@pytest.mark.parametrize("stop", [None, "after 7"])
def test_the_generator_goes_on_as_after_plain_generate(model: Any, stop: str | None) -> None:
    settings = dict(SAMPLED)
    torch.manual_seed(8)
    if stop:  # a token in the middle of the output, often in the middle of a step
        settings["eos_token_id"] = int(model.generate(prompt(), **SAMPLED)[0, 12 + 7])

    def run(**ours: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(8)
        return model.generate(prompt(), **settings, **ours), torch.get_rng_state()

    expected = run()
    for ours in (FEW, MANY):
        assert all(map(torch.equal, run(**ours), expected))


def test_samples_of_a_batch_do_not_depend_on_what_is_drafted(model: Any) -> None:
    outputs = []
    for ours in (FEW, MANY, {"assistant_strategy": "prompt_lookup"}):
        torch.manual_seed(9)
        outputs.append(model.generate(prompt(batch=5), **SAMPLED, **ours).tolist())
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({tuple(row[12:]) for row in outputs[0]}) == 5
    torch.manual_seed(10)
    assert model.generate(prompt(batch=5), **SAMPLED, **FEW).tolist() != outputs[0]
