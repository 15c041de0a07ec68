"""``hf-spec serve``: right answers to many clients at once, errors with reasons, a stop in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from serving import OFFLINE, Server, config, serving
from tiny_checkpoint import save_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

import hf_spec
from hf_spec import cli
from hf_spec.bench.contenders import read_adapters
from hf_spec.decoding.validate import check_request
from hf_spec.serving.strategies import Strategies

MODEL = str(Path(hf_spec.__file__).parent / "demo" / "model")
BITA, MEDUSA = (str(Path(MODEL).parent / "adapters" / name) for name in ("bita", "medusa"))
LOOKUP = "prompt_lookup"
PROMPTS = ["import os\n", "class Tree:\n", "def add(a, b):\n", "for i in range(", "x = [1, 1, 1,"]
#: More than any test waits for: without EOS, until the client goes.
ENDLESS = {"max_new_tokens": 100_000, "eos_token_id": 8191}

#: What a request says besides ``max_new_tokens``, and what the answer to it says.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"assistant_strategy": "nope"}, "'nope' is unknown: choose one of"),
    ({"assistant_strategy": "bita"}, "needs an active adapter of type BITA"),
    ({"assistant_strategy": LOOKUP, "num_beams": 3}, "num_beams=3 with assistant_strategy"),
    ({"assistant_strategy": LOOKUP, "assistant_kwargs": {"max_depth": 0}}, "max_depth=0"),
    ({"assistant_strategy": LOOKUP, "assistant_kwargs": 5}, "give a dict of options"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of any model, for the whole module."""
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def plain() -> Callable[..., str]:
    """``plain(prompt, seed=None, model=MODEL, **options)``: what plain generate adds, as text."""
    loaded: dict[str, Any] = {}

    def generate(prompt: str, seed: int | None = None, model: str = MODEL, **options: Any) -> str:
        if model not in loaded:
            loaded[model] = (
                AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
                AutoTokenizer.from_pretrained(model),
            )
        base, tokenizer = loaded[model]
        inputs = tokenizer(prompt, return_tensors="pt")
        if seed is not None:
            torch.manual_seed(seed)
        options = {"do_sample": False, **options}
        ids = base.generate(**inputs, **options, tokenizer=tokenizer)
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return generate


def complete(server: Server, prompt: str, stream: bool, **options: Any) -> str:
    answer = server.client().completions.create(
        **{"model": MODEL, "prompt": prompt, "stream": stream, **options}
    )
    if not stream:
        return answer.choices[0].text
    return "".join(part.choices[0].text for part in answer)


def test_fifty_requests_of_eight_clients(server: Server, plain: Callable[..., str]) -> None:
    cases = [(prompt, length) for length in (3, 8) for prompt in PROMPTS]
    expected = [plain(prompt, max_new_tokens=length) for prompt, length in cases]

    def ask(number: int) -> str:
        prompt, length = cases[number % len(cases)]
        options = {"assistant_strategy": LOOKUP} if number % 4 else {}
        return complete(
            server, prompt, stream=number % 3 == 0, **config(max_new_tokens=length, **options)
        )

    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(ask, range(50))) == expected * 5


def test_chat(server: Server, plain: Callable[..., str], tiny_chat: str) -> None:
    expected = plain("<|user|>abab<|end|><|assistant|>", model=tiny_chat, max_new_tokens=12)
    for stream in (False, True):
        answer = server.client().chat.completions.create(
            model=tiny_chat, messages=[{"role": "user", "content": "abab"}], stream=stream,
            **config(max_new_tokens=12, assistant_strategy=LOOKUP),
        )  # fmt: skip
        if stream:
            text = "".join(part.choices[0].delta.content or "" for part in answer)
        else:
            text = answer.choices[0].message.content
        # Of a letter that the last token has begun, streams show nothing.
        assert text.rstrip("\ufffd") == expected.rstrip("\ufffd")


def test_stop_strings_end_an_answer(server: Server, plain: Callable[..., str]) -> None:
    whole = plain(PROMPTS[2], max_new_tokens=24)
    stop = whole[10:13]
    expected = plain(PROMPTS[2], max_new_tokens=24, stop_strings=[stop])
    assert len(expected) < len(whole)
    for stream in (False, True):
        for options in ({}, {"assistant_strategy": LOOKUP}):
            found = complete(
                server, PROMPTS[2], stream, stop=[stop], **config(max_new_tokens=24, **options)
            )
            assert found == expected


def test_a_seed_holds_whatever_runs_beside_it(server: Server, plain: Callable[..., str]) -> None:
    sampled = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, "temperature": 2.0}
    expected = [plain(PROMPTS[0], seed=seed, **sampled) for seed in range(4)]
    assert len(set(expected)) == 4

    def ask(seed: int) -> str:
        options = {"assistant_strategy": LOOKUP} if seed % 2 else {}
        stream = seed % 3 == 0
        return complete(server, PROMPTS[0], stream, seed=seed, **config(**sampled, **options))

    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(ask, range(4))) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_told_why(server: Server, stream: bool, tiny_chat: str) -> None:
    import openai

    def refusal(**options: Any) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as caught:
            complete(server, "x", stream, **options)
        detail = caught.value.response.json()["detail"]
        assert detail in str(caught.value)  # also in OpenAI's form
        return caught.value

    for options, reason in REFUSED:
        error = refusal(**config(max_new_tokens=4, **options))
        assert error.status_code == 400 and reason in str(error)
    for given, reason in [
        ({"extra_body": {"generation_config": '{"assistant_strategy": '}}, "Expecting value"),
        ({"extra_body": {"generation_config": "5"}}, "of a wrong type"),
        ({"max_tokens": -1}, "must be greater than 0, but is -1"),
        ({"max_tokens": "many"}, "'many'"),
        ({"stop": 5}, "of a wrong type"),
        ({"seed": "now"}, "seed='now': must be a whole number"),
        ({"model": None}, "model=None: name the model to run."),
        (config(do_sample=True, temperature=-1.0), "strictly positive"),
    ]:
        error = refusal(**given)
        assert error.status_code == 400 and reason in str(error)
    assert refusal(model="no/such-model").status_code == 404
    for messages in (None, [{"content": "x"}]):
        with pytest.raises(openai.BadRequestError, match="must be a list of objects with role"):
            server.client().chat.completions.create(
                model=tiny_chat, messages=messages, stream=stream
            )
    assert complete(server, "x", stream, max_tokens=2)


def test_a_client_that_leaves_holds_nobody_up(server: Server, plain: Callable[..., str]) -> None:
    import openai

    counted = {"name": "requests_total", "outcome": "cancelled"}
    before = server.metric(**counted)
    stream = server.client().completions.create(
        model=MODEL, prompt="x", stream=True, **config(**ENDLESS)
    )
    next(iter(stream))
    with pytest.raises(openai.APITimeoutError):  # waits for the one above
        complete(server, "x", False, timeout=0.5, **config(**ENDLESS))
    server.wait_for(before + 1, **counted)
    stream.close()
    server.wait_for(before + 2, **counted)
    for options in ({}, {"assistant_strategy": LOOKUP}):  # one that runs
        with pytest.raises(openai.APITimeoutError):
            complete(server, "x", False, timeout=0.5, **config(**ENDLESS, **options))
    server.wait_for(before + 4, **counted)
    assert server.metric("requests_running") == server.metric("requests_waiting") == 0
    text = complete(server, "x", False, **config(max_new_tokens=4))
    assert text == plain("x", max_new_tokens=4)


def test_requests_wait_for_their_turn(server: Server) -> None:
    labels = {"model": MODEL}
    stream = server.client().completions.create(
        model=MODEL, prompt="x", stream=True, **config(**ENDLESS)
    )
    next(iter(stream))
    with ThreadPoolExecutor(3) as clients:
        waiting = [
            clients.submit(complete, server, "x", True, **config(max_new_tokens=2))
            for _ in range(3)
        ]
        server.wait_for(3, "requests_waiting", **labels)
        assert server.metric("requests_running", **labels) == 1
        assert not any(one.done() for one in waiting)
        stream.close()
        assert len({one.result(60) for one in waiting}) == 1
    server.wait_for(0, "requests_running", **labels)


def test_metrics_follow_the_requests(server: Server, plain: Callable[..., str]) -> None:
    labels = {"model": MODEL, "strategy": LOOKUP}

    def figures() -> list[float]:
        names = ("requests_total", "prompt_tokens_total", "generated_tokens_total")
        return [server.metric(name, **labels) for name in (*names, "forward_passes_total", "tau")]

    def ask(**kwargs: Any) -> Any:
        return server.client().completions.create(
            model=MODEL, prompt="import os\n" * 4,
            **config(
                max_new_tokens=40, eos_token_id=8191, assistant_strategy=LOOKUP,
                assistant_kwargs=kwargs,
            ),
        )  # fmt: skip

    before = figures()
    answer = ask(fallback=False)  # every step drafts
    after = figures()
    requests, prompted, generated, passes, _ = (one - old for one, old in zip(after, before))
    assert requests == 1 and prompted == answer.usage.prompt_tokens and generated == 40
    assert 1 <= passes < 40  # it repeats itself, and look-ups see that
    earlier = before[3] * before[4]  # tokens of finished requests
    assert after[4] == pytest.approx((earlier + 40) / after[3])
    ask()  # times plain steps, too
    assert server.metric("speedup", **labels) > 0
    for name in ("wait", "first_token", "request"):
        counts = [server.metric(f"{name}_seconds_count", **labels), figures()[0]]
        assert 0 < counts[0] <= counts[1]
    assert server.metric("tau", strategy="plain") == 0  # says nothing of it


def test_a_stop_lets_answers_finish_in_a_bounded_time(plain: Callable[..., str]) -> None:
    import openai

    with serving(MODEL, "--grace", "2", forked=True) as server:
        assert [model.id for model in server.client().models.list()] == [MODEL]
        cut: list[openai.APIError] = []

        def wait_in_vain() -> None:
            try:
                complete(server, "x", False, **config(**ENDLESS))
            except openai.APIError as error:
                cut.append(error)

        running = server.client().completions.create(
            model=MODEL, prompt="x", stream=True, **config(max_new_tokens=30)
        )
        parts = iter(running)
        text = next(parts).choices[0].text
        thread = threading.Thread(target=wait_in_vain)
        thread.start()
        begun = ("requests_waiting", "requests_running", "requests_total")
        while sum(server.metric(name) for name in begun) < 2:  # the first may have ended already
            time.sleep(0.02)
        os.kill(server.process.pid, signal.SIGTERM)
        text += "".join(part.choices[0].text for part in parts)
        assert text == plain("x", max_new_tokens=30)
        deadline = time.monotonic() + 30
        while True:  # from some moment on nobody gets in
            try:
                server.get("/health")
            except OSError:
                break
            assert time.monotonic() < deadline
        thread.join(30)
        assert cut[0].status_code == 503 and "The server was stopped" in str(cut[0])
        assert server.code(30) == -signal.SIGTERM


def test_requests_are_checked_without_generating(tiny: Callable[..., PreTrainedModel]) -> None:
    model = tiny()
    for options, reason in REFUSED:
        with pytest.raises(ValueError, match=reason):
            check_request(model, GenerationConfig(**options), continuous=False)
    with pytest.raises(ValueError, match="Start the server without --continuous-batching"):
        check_request(model, GenerationConfig(assistant_strategy=LOOKUP), continuous=True)
    for continuous in (False, True):
        check_request(model, GenerationConfig(num_beams=3), continuous)
    check_request(model, GenerationConfig(assistant_strategy=LOOKUP), continuous=False)


# -- adapters --------------------------------------------------------------------------------


def test_two_adapters_side_by_side(plain: Callable[..., str]) -> None:
    import openai

    arguments = ["--adapter", BITA, "--adapter", MEDUSA, "--strategy", "bita"]
    with serving(MODEL, *arguments, forked=True) as server:
        for strategy in ("bita", "medusa", LOOKUP):
            drafts = {"assistant_strategy": strategy, "assistant_kwargs": {"fallback": False}}
            for number, prompt in enumerate(PROMPTS[:3]):
                found = complete(
                    server, prompt, number % 2 == 0, **config(max_new_tokens=24, **drafts)
                )
                assert found == plain(prompt, max_new_tokens=24)
            labels = {"model": MODEL, "strategy": strategy}
            assert server.metric("requests_total", outcome="finished", **labels) == 3
            assert server.metric("tau", **labels) > 1

        def finished(**options: Any) -> dict[str, float]:
            assert complete(server, "x", False, **options)
            names = ("bita", "plain")
            return {n: server.metric("requests_total", strategy=n) for n in names}

        # Those that name none have the default one, unless they ask for none or cannot have it.
        assert finished(max_tokens=3, temperature=0) == {"bita": 4, "plain": 0}
        assert finished(**config(max_new_tokens=3)) == {"bita": 5, "plain": 0}
        none = config(max_new_tokens=3, assistant_strategy=None)
        assert finished(**none) == {"bita": 5, "plain": 1}
        assert finished(**config(max_new_tokens=3, num_beams=2)) == {"bita": 5, "plain": 2}
        for name, reason in (("ppd", "needs an active adapter"), ("nope", "is unknown")):
            with pytest.raises(openai.BadRequestError) as caught:
                complete(server, "x", False, **config(assistant_strategy=name))
            assert reason in str(caught.value)
            offered = "This server offers bita, layer_skip, medusa, prompt_lookup;"
            assert offered in str(caught.value)


def test_a_server_with_an_adapter_of_another_base_does_not_start(tiny_chat: str) -> None:
    done = forks.run(OFFLINE, "serve", tiny_chat, "--adapter", BITA)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("hf-spec: ")]
    assert line.startswith(f"hf-spec: cannot load adapter {BITA!r}: this BITA adapter was made for")
    assert "vocab_size" in line or "hidden_size" in line or "model_type" in line


def test_strategies_of_a_server_are_checked_when_it_starts(
    tiny: Callable[..., PreTrainedModel],
) -> None:
    bita, medusa = read_adapters([BITA, MEDUSA])
    with pytest.raises(ValueError, match="are both for strategy 'bita', by which requests choose"):
        Strategies([bita, medusa, *read_adapters([BITA])])
    with pytest.raises(ValueError, match="strategy 'ppd' needs a trained adapter: give --adapter"):
        Strategies([bita], "ppd")
    with pytest.raises(ValueError, match="'nope' is unknown"):
        Strategies([bita], "nope")
    with pytest.raises(ValueError, match="--adapter needs the model that it was trained for"):
        Strategies([bita]).prepare(None, False)
    with pytest.raises(ValueError, match="--adapter with --continuous-batching"):
        Strategies([bita]).prepare(tiny(), True)
    with pytest.raises(ValueError, match="--strategy with --continuous-batching"):
        Strategies([], LOOKUP).prepare(None, True)
    with pytest.raises(ValueError, match="strategy 'layer_skip': .*skip_attention"):
        Strategies([], "layer_skip").prepare(tiny(), False)


def test_lossy_stored_options_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    [medusa] = read_adapters([MEDUSA])
    lossy = replace(medusa, options={"acceptance": "typical"})
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    with caplog.at_level("WARNING"):
        Strategies([lossy]).prepare(model, False)
    assert f"{MEDUSA} asks for acceptance='typical'" in caplog.text


def test_stored_options_hold_unless_a_request_gives_others() -> None:
    [medusa] = read_adapters([MEDUSA])
    strategies = Strategies([replace(medusa, options={"fallback": False, "candidates": 4})])
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    strategies.prepare(model, False)

    def settled(**given: Any) -> Any:
        config = GenerationConfig(**given)
        strategies.settle(model, config, given, False)
        return config.assistant_strategy, config.assistant_kwargs

    assert settled() == (None, None)
    named = {"assistant_strategy": "medusa"}
    assert settled(**named) == ("medusa", {"fallback": False, "candidates": 4})
    found = settled(**named, assistant_kwargs={"candidates": 6, "tree": "adaptive"})
    assert found == ("medusa", {"fallback": False, "candidates": 6, "tree": "adaptive"})
    assert settled(assistant_strategy=LOOKUP) == (LOOKUP, None)
    with pytest.raises(ValueError, match="candidates=0"):
        settled(**named, assistant_kwargs={"candidates": 0})
    strategies.default = "medusa"
    assert settled() == ("medusa", {"fallback": False, "candidates": 4})
    assert settled(assistant_kwargs={"candidates": 6})[1] == {"fallback": False, "candidates": 6}
    with pytest.raises(ValueError, match="candidates=0"):
        settled(assistant_kwargs={"candidates": 0})
    assert settled(num_beams=2) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "default"),
    [
        ([], None),
        (["--adapter", BITA], "bita"),
        (["--adapter", BITA, "--strategy", "none"], None),
        (["--adapter", BITA, "--strategy", LOOKUP], LOOKUP),
        (["--adapter", BITA, "--adapter", MEDUSA], None),
        (["--strategy", LOOKUP], LOOKUP),
    ],
)
def test_the_default_strategy(
    arguments: list[str], default: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.cli import transformers as program

    from modeling_patches import serving as patches

    made: list[Any] = []
    monkeypatch.setattr(patches, "patch", lambda prepare, *rest: made.append(prepare.__self__))
    monkeypatch.setattr(program, "app", lambda *args, **kwargs: None)
    assert cli.main(["serve", MODEL, *arguments]) == 0
    assert made[0].default == default and len(made[0].adapters) == arguments.count("--adapter")
