"""``hf-spec serve``: Transformers' server, whose models have adapters and a default strategy."""

import asyncio
import copy
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from tiny_checkpoint import plain_text
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils.import_utils import is_serve_available

import hf_spec
from hf_spec import StepSharing
from hf_spec.core.stats import SpecStats
from hf_spec.tools import cli
from hf_spec.tools.cli.serve import Metrics, _prepare_models, _usage

DEMO = Path(hf_spec.__file__).parent / "tools" / "demo"
MODEL = str(DEMO / "model")
MEDUSA, BITA = (str(DEMO / "adapters" / name) for name in ("medusa", "bita"))
PROMPTS = ["import os\n", "class Tree:\n", "def add(a, b):\n", "for i in range("]

needs_packages = pytest.mark.skipif(
    not is_serve_available(), reason="needs the packages of hf_spec[serve]"
)


class Server:
    """``hf-spec serve`` with these arguments, on the CPU in fp32, once it answers."""

    def __init__(self, *arguments: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "hf_spec.tools.cli", "serve", *arguments, "--device", "cpu",
                "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port),
            ],
            env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(self.address + "/health", timeout=30).close()
                return
            except OSError:
                alive = self.process.poll() is None
                assert alive and time.monotonic() < deadline, self.process.stderr.read()
                time.sleep(0.1)

    def client(self) -> Any:
        import openai

        base = f"{self.address}/v1"
        return openai.OpenAI(base_url=base, api_key="none", timeout=120, max_retries=0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with two adapters that samples by default."""
    arguments = ["--adapter", MEDUSA, "--adapter", BITA, "--strategy", "medusa", "--do-sample"]
    server = Server(MODEL, *arguments)
    yield server
    server.process.kill()
    server.process.communicate()


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def text(base: PreTrainedModel, prompt: str, seed: int | None = None, **options: Any) -> str:
    """What plain generate adds to the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    if seed is not None:
        torch.manual_seed(seed)
    return plain_text(base, tokenizer, prompt, **options)


def ask(server: Server, prompt: str, stream: bool = False, **options: Any) -> str:
    answer = server.client().completions.create(
        model=MODEL, prompt=prompt, stream=stream, **options
    )
    if not stream:
        return answer.choices[0].text
    return "".join(part.choices[0].text for part in answer)


def metrics(server: Server) -> dict[tuple[str, str], float]:
    """Numbers by name and strategy."""
    with urllib.request.urlopen(server.address + "/metrics", timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line[0] != "#"]
    pattern = re.compile(r'hf_spec_(\w+)\{model="[^"]+"(?:,strategy="(\w+)")?\} (\S+)')
    found = [pattern.fullmatch(line) for line in lines]
    return {(one[1], one[2] or ""): float(one[3]) for one in found}


def config(**options: Any) -> dict[str, Any]:
    return {"extra_body": {"generation_config": json.dumps({"do_sample": False, **options})}}


@pytest.mark.environment
@needs_packages
def test_requests_get_what_plain_generate_gives(server, base):
    """The server's strategy, one that the request names, and none."""
    expected = [text(base, prompt, max_new_tokens=12) for prompt in PROMPTS]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 12},
        config(max_new_tokens=12, assistant_strategy="bita"),
        config(max_new_tokens=12, assistant_strategy="prompt_lookup"),
        config(max_new_tokens=12),
    ]

    def one(number: int) -> str:
        prompt = PROMPTS[number % len(PROMPTS)]
        return ask(server, prompt, stream=number % 3 == 0, **kinds[number // len(PROMPTS)])

    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(one, range(16))) == expected * 4


@pytest.mark.environment
@needs_packages
def test_clients_share_steps_beside_one_that_goes_away(server, base):
    """Of eight, half stream; one more is refused. The one that leaves has the longest answer, so
    that all others share their steps with it."""
    import openai

    prompts = [f"{prompt}# {number}\n" for number, prompt in enumerate(PROMPTS * 2)]
    sizes = [8 + 3 * number for number in range(8)]
    expected = [text(base, one, max_new_tokens=size) for one, size in zip(prompts, sizes)]
    before = metrics(server)
    long = server.client().completions.create(
        model=MODEL, prompt=PROMPTS[0], stream=True,
        **config(max_new_tokens=900, min_new_tokens=900, assistant_strategy="medusa"),
    )  # fmt: skip
    next(iter(long))
    with ThreadPoolExecutor(9) as clients:
        answers = [
            clients.submit(
                ask, server, prompt, number % 2 == 0, temperature=0, max_tokens=sizes[number]
            )
            for number, prompt in enumerate(prompts)
        ]
        refused = clients.submit(ask, server, PROMPTS[0], True, **config(assistant_strategy="ppd"))
        with pytest.raises(openai.BadRequestError, match="needs an active adapter of type PPD"):
            refused.result()
        assert answers[0].result() == expected[0]
        assert metrics(server)["rows", ""] > 1
        long.close()
        assert [answer.result() for answer in answers] == expected
    while metrics(server)["rows", ""]:
        time.sleep(0.05)
    after = metrics(server)
    assert not after["cached_tokens", ""]
    # The one that went away was not answered.
    assert after["requests_total", "medusa"] - before.get(("requests_total", "medusa"), 0) == 8
    new = after["tokens_total", "medusa"] - before.get(("tokens_total", "medusa"), 0)
    assert 0 < new <= sum(sizes) and after["tau", "medusa"] > 1


@pytest.mark.environment
@needs_packages
def test_what_the_help_says_is_honored(server, base):
    """Temperature and seed, where the server samples; stop strings; a chat."""
    sampled = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 8, "top_k": 50}
    for seed in range(2):
        expected = text(base, PROMPTS[0], seed=seed, **sampled)
        assert ask(server, PROMPTS[0], temperature=1.5, seed=seed, max_tokens=8) == expected
    whole = text(base, PROMPTS[2], max_new_tokens=24)
    stop = whole[10:13]
    stopped = text(base, PROMPTS[2], max_new_tokens=24, stop_strings=[stop])
    assert len(stopped) < len(whole)
    assert ask(server, PROMPTS[2], temperature=0, max_tokens=24, stop=[stop]) == stopped
    listed = server.client().models.list()
    assert listed.object == "list"


@pytest.mark.environment
@needs_packages
def test_the_server_goes_on_after_a_bad_request(server, tmp_path):
    import openai

    here = {"assistant_strategy": "medusa", "assistant_kwargs": {"adapter": str(tmp_path)}}
    refused = {
        "adapter='.*': a request names no file, folder or repository. Start the server": here,
        "num_return_sequences=2: the server gives one answer": {
            "num_return_sequences": 2, "do_sample": True
        },
        "assistant_strategy='fastest': choose one of": {"assistant_strategy": "fastest"},
        "needs an active adapter of type PPD": {"assistant_strategy": "ppd"},
        "has no option 'widht'": {
            "assistant_strategy": "medusa", "assistant_kwargs": {"widht": 3}
        },
    }  # fmt: skip
    for message, options in refused.items():
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=message) as error:
                ask(server, PROMPTS[0], stream, **config(max_new_tokens=4, **options))
            assert error.value.status_code == 400
    with pytest.raises(openai.BadRequestError, match="generation_config is not JSON"):
        ask(server, PROMPTS[0], extra_body={"generation_config": "{"})
    given = {"generation_config": {"do_sample": False, "max_new_tokens": 4}}
    assert ask(server, PROMPTS[0], extra_body=given) == ask(
        server, PROMPTS[0], **config(**given["generation_config"])
    )
    given["generation_config"] |= {
        "assistant_strategy": "auto",
        "assistant_kwargs": {"adapter": MEDUSA},
    }  # the server's own
    assert ask(server, PROMPTS[0], extra_body=given) == ask(
        server, PROMPTS[0], **config(max_new_tokens=4)
    )
    with pytest.raises(openai.BadRequestError, match="tokens, and the model's context holds"):
        ask(server, PROMPTS[0] * 10_000)
    assert ask(server, PROMPTS[0], temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Iterator[tuple[Server, str]]:
    """A server whose model has a chat template, and the model's name."""
    folder = tmp_path_factory.mktemp("chats") / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for one in messages %}# {{ one.content }}\n{% endfor %}"
    )
    server = Server(str(folder), "--adapter", MEDUSA)
    yield server, str(folder)
    server.process.kill()
    server.process.communicate()


@pytest.mark.environment
@needs_packages
@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_of_an_answer_says_what_was_accepted(chats, stream):
    """In chats, texts and responses; also where several are answered at once."""
    server, model = chats
    client, more = server.client(), {"temperature": 0, "max_tokens": 12, "stream": stream}

    def of_texts(number: int) -> Any:
        return last(client.completions.create(model=model, prompt=PROMPTS[number], **more)).usage

    def last(answer: Any) -> Any:
        return [*answer][-1] if stream else answer

    with ThreadPoolExecutor(4) as clients:
        usages = [*clients.map(of_texts, range(4))]
    for usage in usages:
        passes, details = usage.speculation["forward_passes"], usage.completion_tokens_details
        assert usage.completion_tokens == 12 and usage.speculation["strategy"] == "medusa"
        assert usage.speculation["tau"] == pytest.approx(12 / passes, abs=1e-3)
        # Each pass emits a token of its own; the last one may have accepted more than fit.
        assert 12 - passes <= details.accepted_prediction_tokens <= 12 + 8
        assert details.rejected_prediction_tokens >= 0
    assert any(usage.completion_tokens_details.accepted_prediction_tokens for usage in usages)
    chat = [{"role": "user", "content": PROMPTS[0]}]
    usage = last(client.chat.completions.create(model=model, messages=chat, **more)).usage
    assert usage.speculation["tau"] >= 1
    answer = last(
        client.responses.create(
            model=model, input=PROMPTS[0], temperature=0, max_output_tokens=8, stream=stream
        )
    )
    usage = answer.response.usage if stream else answer.usage
    assert usage.output_tokens_details.reasoning_tokens == 0 and usage.speculation["tau"] >= 1
    assert usage.output_tokens_details.accepted_prediction_tokens >= 0
    assert usage.input_tokens_details.cached_tokens >= 0  # its tokenizer makes few of them


@pytest.mark.environment
@needs_packages
def test_more_tokens_than_there_are(server, base):
    """As many as the context leaves."""
    limit = base.config.max_position_embeddings
    made = server.client().completions.create(
        model=MODEL, prompt=PROMPTS[0], temperature=0, max_tokens=10**30, stop=["zzzzzz"]
    )
    assert 0 < made.usage.completion_tokens <= limit - made.usage.prompt_tokens


@pytest.mark.environment
@needs_packages
def test_its_log_says_how_it_generates():
    """At the start, and of each request."""
    server = Server(MODEL, "--adapter", MEDUSA, "--max-rows", "2")
    ask(server, PROMPTS[0], temperature=0, max_tokens=6)
    ask(server, PROMPTS[0], stream=True, temperature=0, max_tokens=6)
    ask(server, PROMPTS[0], **config(max_new_tokens=4, assistant_strategy="prompt_lookup"))
    server.process.kill()
    said = server.process.communicate()[1].splitlines()
    ours = [line for line in said if line.startswith("hf-spec: ")]
    assert ours[0] == f"hf-spec: strategy medusa, adapters: {MEDUSA} (medusa)"
    expected = [
        f"hf-spec: {what} tokens" for what in ("medusa: 6", "medusa: 6", "prompt_lookup: 4")
    ]
    assert [line.split(", tau ")[0] for line in ours[1:]] == expected
    assert all(line.endswith(" tokens/s, 1.0 rows") for line in ours[1:])


@pytest.mark.environment
@needs_packages
def test_two_interrupts_end_it_at_once():
    """While an answer is streamed, without a crash of torch's threads."""
    server = Server(MODEL)
    body = {"model": MODEL, "prompt": PROMPTS[0], "stream": True, "max_tokens": 4000}
    asked = urllib.request.Request(
        f"{server.address}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(asked, timeout=120) as stream:
        assert stream.readline().startswith(b"data: ")
        for _ in range(2):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        error = server.process.communicate(timeout=60)[1]
    assert server.process.returncode == 130 and error.endswith("hf-spec: interrupted\n")
    assert "terminate called" not in error


@pytest.mark.environment
@needs_packages
def test_an_adapter_of_another_base_does_not_start(checkpoint):
    with pytest.raises(AssertionError, match="cannot load adapter.*medusa"):
        Server(str(checkpoint), "--adapter", MEDUSA)


@pytest.mark.parametrize(
    ("adapters", "strategy", "batching", "message"),
    [([], "medusa", False, "'medusa' needs a trained adapter: give --adapter"),
     ([], "prompt_lookup", True, "--continuous-batching with strategy 'prompt_lookup'"),
     (["./nowhere"], None, False, "cannot read adapter './nowhere'")],
)  # fmt: skip
def test_what_does_not_go_together(adapters, strategy, batching, message):
    with pytest.raises(ValueError, match=message):
        _prepare_models(adapters, strategy, None, batching)


@pytest.mark.parametrize(
    ("limit", "message"),
    [("--max-rows=2", "--max-rows with --no-share-steps: it limits requests that share steps"),
     ("--max-cached-tokens=9", "--max-cached-tokens with --no-share-steps"),
     ("--max-rows=0", "'--max-rows': Input should be greater than or equal to 1")],
)  # fmt: skip
@needs_packages
def test_limits_of_what_is_turned_off(capsys, limit, message):
    assert cli.main(["serve", "some/model", "--no-share-steps", limit]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


class Served:
    """What is set for servers that start now, with a strategy; none starts."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *sharing: Any,
        strategy: str | None = "prompt_lookup", batching: bool = False,
    ):  # fmt: skip
        from hf_spec.modeling_patches import served_models

        monkeypatch.setattr(
            served_models, "on_load", lambda prepare: setattr(self, "load", prepare)
        )
        monkeypatch.setattr(
            served_models,
            "on_request",
            lambda *two: vars(self).update(check=two[0], at_once=two[1]),
        )
        monkeypatch.setattr(served_models, "on_metrics", lambda text: setattr(self, "text", text))
        _prepare_models((), strategy, None, batching, *sharing)


@needs_packages
@pytest.mark.parametrize(
    ("strategy", "batching", "expected"),
    [(None, False, "auto"), (None, True, None), ("none", False, None), ("auto", False, "auto")],
)
def test_the_strategy_of_a_server_without_adapters(
    monkeypatch, checkpoint, strategy, batching, expected
):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    Served(monkeypatch, strategy=strategy, batching=batching).load(model)
    assert model.generation_config.assistant_strategy == expected


@needs_packages
def test_a_model_without_a_strategy_is_served_unless_one_is_named(monkeypatch, checkpoint, capsys):
    """Here its own configuration asks for what no strategy has."""
    for strategy, message in ((None, ""), ("auto", "num_beams=2")):
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        model.generation_config.num_beams = 2
        served = Served(monkeypatch, strategy=strategy)
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            served.load(model)
        assert bool(message) or model.generation_config.assistant_strategy is None
    assert "hf-spec: no strategy by default: num_beams=2" in capsys.readouterr().err


@needs_packages
@pytest.mark.parametrize(
    ("sharing", "kind", "at_once"),
    [
        ((), {}, 32),
        ((True, {"max_rows": 3, "max_cached_tokens": None}), {}, 3),
        ((True, {"max_cached_tokens": 64, "prompt_part": 9}), {}, 32),
        ((), {"assistant_strategy": None}, 1),
        ((), {"cache_implementation": "static"}, 1),
        ((), {"compile_config": CompileConfig()}, 1),
        ((False,), {}, 1),
    ],
)
def test_how_many_requests_run_at_once(monkeypatch, checkpoint, sharing, kind, at_once):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    served = Served(monkeypatch, *sharing)
    served.load(model)
    config = copy.deepcopy(model.generation_config)
    config.update(**kind)
    assert served.at_once(model, config) == at_once
    if found := StepSharing.of(model):
        limits = dict(*sharing[1:])
        assert found.max_cached_tokens == limits.get("max_cached_tokens")
        assert found.prompt_part == limits.get("prompt_part", 256)


@needs_packages
def test_models_that_answer_one_request_at_a_time(monkeypatch, checkpoint, capsys):
    """Those whose forwards would disturb each other in several threads."""
    served, loads = Served(monkeypatch), partial(AutoModelForCausalLM.from_pretrained, checkpoint)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    turned = {
        "rotary frequencies follow": loads(rope_parameters=rope),
        "weights are offloaded": AutoModelForCausalLM.from_pretrained(checkpoint),
    }
    cpu_offload(turned["weights are offloaded"], torch.device("cpu"))
    for why, model in turned.items():
        served.load(model)
        assert re.search(f"requests run one at a time: .*{why}", capsys.readouterr().err)
        assert served.at_once(model, model.generation_config) == 1


@needs_packages
def test_a_request_names_no_file(monkeypatch, checkpoint, tmp_path):
    """But that of the server, which lookups add to; nor an adapter, and gets one answer."""
    model, own = AutoModelForCausalLM.from_pretrained(checkpoint), str(tmp_path / "own")
    served = Served(monkeypatch, True, None, json.dumps({"lookup_history": own}))
    served.load(model)
    config, inputs = model.generation_config, {"input_ids": torch.tensor([[3, 4, 5]])}
    assert config.assistant_kwargs == {"lookup_history": own}
    served.check(model, None, inputs, config)
    for where, message in ((100, None), (str(tmp_path / "other"), "a request names no file")):
        config.assistant_kwargs = {"lookup_history": where}
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            served.check(model, None, inputs, config)
    for where, message in ((None, None), (str(tmp_path), "request names no file, folder or rep")):
        config.assistant_strategy, config.assistant_kwargs = "auto", {"adapter": where}
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            served.check(model, None, inputs, config)
    config.assistant_kwargs = {}
    config.num_return_sequences = 3
    with pytest.raises(ValueError, match="num_return_sequences=3: the server gives one answer"):
        served.check(model, None, inputs, config)
    with pytest.raises(ValueError, match="--strategy-kwargs needs the name of a strategy"):
        _prepare_models((), "none", None, False, strategy_kwargs="{}")


STATS = SpecStats("medusa", num_row_steps=4, num_generated_tokens=9, num_drafted_tokens=12)
STATS.accepted.update({1: 3, 2: 2})
STATS.details["shared"] = {"rows": 2.0, "reused": 17}


@needs_packages
def test_a_usage_has_what_was_accepted_in_each_form_of_answers():
    """Also in a stream, whose last part waits for the end of the call."""
    from concurrent.futures import Future

    from hf_spec.modeling_patches.served_models import Request

    request, closed = Request(), []
    request.usage = _usage(STATS)
    more = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 7}
    said = {"strategy": "medusa", "tau": 2.25, "forward_passes": 4}
    chat: dict[str, Any] = {"usage": {"completion_tokens": 9}}
    response = {"response": {"usage": {"output_tokens": 9, "output_tokens_details": {"r": 0}}}}
    for answer in (chat, response, {"x": 1}, {"usage": None}):
        request.add_to(answer)
    cached = {"cached_tokens": 17}
    whole = {
        "completion_tokens": 9, "completion_tokens_details": more, "speculation": said,
        "prompt_tokens_details": cached,
    }  # fmt: skip
    assert chat == {"usage": whole}
    details = {
        "output_tokens": 9, "output_tokens_details": {"r": 0, **more}, "speculation": said,
        "input_tokens_details": cached,
    }  # fmt: skip
    assert response == {"response": {"usage": details}}

    text = r'data: {"text":"\"usage\":{ é"}' + "\n\n"
    ends = 'event: e\ndata: {"text":"é","usage":{"completion_tokens":9}}\n\n'

    async def parts() -> Any:
        try:
            yield text
            yield ends
        finally:
            closed.append(True)

    async def read() -> list[str]:
        request.ends = Future()
        asyncio.get_running_loop().call_later(0.05, request.ends.set_result, None)
        request.usage = {}
        request.ends.add_done_callback(lambda _: setattr(request, "usage", _usage(STATS)))
        return [part async for part in request.told(parts())]

    first, last = asyncio.run(read())
    assert first == text and last.startswith('event: e\ndata: {"text":"é",')
    assert json.loads(last.split("data: ")[1])["usage"] == whole and last.endswith("\n\n")

    async def leave() -> None:
        stream = request.told(parts())
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert closed == [True, True]


def test_metrics_are_counts_in_the_text_format_of_prometheus(monkeypatch, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    now = [0.0]
    kept = Metrics(clock=lambda: now[0])
    with hf_spec.share_steps(model) as sharing:
        kept.follow('a "name"', sharing)
        for at, tokens in ((10.0, 30), (50.0, 15)):
            now[0] = at
            kept.add("m", SpecStats(
                "medusa", num_row_steps=10, num_generated_tokens=tokens, forward_seconds=0.5
            ))  # fmt: skip
        with sharing.admitted(3, 40):
            found = kept.text()
        now[0] = 80.0  # the first one is more than a minute ago
        later = kept.text()
    lines = [line for line in found.splitlines() if line[0] != "#"]
    of_all = '{model="m",strategy="medusa"}'
    assert lines == [
        'hf_spec_rows{model="a \\"name\\""} 3',
        'hf_spec_cached_tokens{model="a \\"name\\""} 120',
        'hf_spec_prefix_tokens{model="a \\"name\\""} 0',
        f"hf_spec_requests_total{of_all} 2",
        f"hf_spec_request_seconds_total{of_all} 1",
        f"hf_spec_tokens_total{of_all} 45",
        f"hf_spec_row_steps_total{of_all} 20",
        f"hf_spec_tau{of_all} 2.25",
        f"hf_spec_tokens_per_second{of_all} 0.9",
    ]
    assert f"tokens_per_second{of_all} 0.25" in later and '"} 0' in later
    kinds = re.findall(r"# HELP (\w+) .+\n# TYPE \1 (gauge|counter)\n", found)
    assert [name for name, _ in kinds] == [line.partition("{")[0] for line in lines]
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds)


@needs_packages
@pytest.mark.parametrize("kind", ["object", "JSON"])
def test_a_request_s_generation_config_is_an_object_or_json(kind):
    from transformers.cli.serving.completion import CompletionHandler

    from hf_spec.modeling_patches import served_models

    assert served_models.utils.BaseHandler
    build = CompletionHandler(None, SimpleNamespace(_compile=False))._build_generation_config
    given = {"assistant_strategy": "plain", "top_k": 3}
    given = json.dumps(given) if kind == "JSON" else given
    config = build({"generation_config": given}, GenerationConfig())
    assert (config.assistant_strategy, config.top_k) == ("plain", 3)
    assert build({"max_tokens": 3}, GenerationConfig()).max_new_tokens == 3
    refused = {
        "{top_k: 3}": "generation_config is not JSON: Expecting", "[1]": "must be an object",
        '{"max_new_tokens": "x"}': "generation_config: '<=' not supported",
    }  # fmt: skip
    for text, message in refused.items():
        with pytest.raises(ValueError, match=message):  # which the server answers with 400
            build({"generation_config": text}, GenerationConfig())


@needs_packages
def test_help_says_what_a_request_may_say(capsys):
    assert cli.main(["serve", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("honored", "transformers serve", "temperature"))
    from transformers.cli.serving.chat_completion import UNUSED_CHAT_COMPLETION_FIELDS as unused

    ignored = said.partition("ignored")[2].partition("\n")[0].replace(",", "").split()
    assert ignored and set(ignored) <= unused


ARENAS = """
import ctypes, sys, threading
from hf_spec.tools.cli.serve import limit_arenas
if sys.argv[2:]:
    limit_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
at_once = threading.Barrier(6)
def allocate():
    at_once.wait()
    libc.malloc(ctypes.c_size_t(1000))
    at_once.wait()
threads = [threading.Thread(target=allocate) for _ in range(6)]
[one.start() for one in threads]
[one.join() for one in threads]
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="glibc's")
def test_threads_share_a_few_arenas(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}

    def arenas(*limited, **more):
        path = tmp_path / "info"
        command = [sys.executable, "-c", ARENAS, str(path), *limited]
        subprocess.run(command, check=True, env={**env, **more})
        return path.read_text().count("<heap nr=")

    assert arenas() > 2 == arenas("limited")
    assert arenas("limited", MALLOC_ARENA_MAX="3") == 3
