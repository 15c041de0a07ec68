"""``hf-spec distill --endpoint``: an engine answers, here a small server around a tiny model."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from tiny_checkpoint import save_checkpoint, write_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec.tools import cli
from hf_spec.tools.training.dataset import read_answers, read_provenance
from hf_spec.tools.training.endpoint import RETRIES, base_address

pytest.importorskip("datasets")
pytest.importorskip("accelerate")

NEW, AT_ONCE, EOS = 12, 4, [1, 55]
PROMPTS = [{"prompt": "abc "[: i % 4 + 1] * (i % 3 + 1) + str(i)} for i in range(14)]


class Engine:
    """Serves a model; counts requests, and says what it was told to say instead.

    Attributes:
        failures: statuses and replies of the next requests for answers.
        hosts: by which host each request for an answer came.
        together: where so many requests of the first ones wait for each other.
    """

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.names = [str(folder)]
        self.failures: list[tuple[int, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.hosts: list[str] = []
        self.keys: set[str | None] = set()
        self.together: threading.Barrier | None = None
        self.lock, self.running, self.most = threading.Lock(), 0, 0

    def models(self) -> tuple[int, Any]:
        return 200, {"data": [{"id": name, "owned_by": "a test"} for name in self.names]}

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.bodies.append(body)
            waits = self.together is not None and len(self.bodies) <= self.together.parties
        if waits:
            self.together.wait(timeout=60)
        with self.lock:
            self.running -= 1
            if self.failures:
                return self.failures.pop(0)
            prompt = body["prompt"]
            found = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=body["max_tokens"], do_sample=False,
                eos_token_id=body["stop_token_ids"],
            )[0, len(prompt) :].tolist()  # fmt: skip
        ended = found[-1] in body["stop_token_ids"]
        text = self.tokenizer.decode(found[:-1] if ended else found)
        choice = {"text": text, "finish_reason": "stop" if ended else "length"}
        if body["return_token_ids"]:
            choice |= {"token_ids": found, "prompt_token_ids": prompt}
        return 200, {"choices": [choice]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model ``m`` and prompts ``p.jsonl``."""
    folder = tmp_path_factory.mktemp("endpoint")
    save_checkpoint(folder / "m")
    config = folder / "m" / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": EOS}))
    write_prompts(folder / "p.jsonl", PROMPTS)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ThreadingHTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(*engine().models())

        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            engine().keys.add(self.headers["Authorization"])
            engine().hosts.append(urlsplit(f"//{self.headers['Host']}").hostname)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(*engine().complete(body))

        def reply(self, status: int, content: Any) -> None:
            written = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(written)))
            self.end_headers()
            self.wfile.write(written)

        def log_message(self, *args: Any) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.handle_error = lambda *args: None  # of requests that were given up

    def engine() -> Engine:
        return found.engine

    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture
def engine(server: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.engine = Engine(folder / "m")
    server.engine.address = f"http://127.0.0.1:{server.server_port}"
    return server.engine


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds between tries, which nobody waits for."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


def distill(folder: Path, output: Path, *more: str) -> int:
    given = {
        "--model": str(folder / "m"), "--prompts": str(folder / "p.jsonl"), "--output": str(output),
        "--max-new-tokens": str(NEW), "--batch-size": str(AT_ONCE),
    }  # fmt: skip
    options = [word for name, value in given.items() if name not in more for word in (name, value)]
    return cli.main(["distill", *options, *more])


@pytest.fixture(scope="module")
def oracle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows that a model in this process gives."""
    output = tmp_path_factory.mktemp("oracle")
    local = ("--dtype", "float32", "--device", "cpu", "--strategy", "none")
    assert distill(folder, output, *local) == 0
    rows = list(read_answers(output))
    lengths = {len(row["answer_ids"]) for row in rows}
    ends = Counter(row["answer_ids"][-1] in EOS for row in rows)
    assert len(lengths) > 2 and min(ends[True], ends[False]) > 1, "the prompts show nothing"
    return rows


def test_an_engine_gives_the_rows_that_a_model_here_gives(folder, engine, oracle, tmp_path, capsys):
    """And is asked for so many at a time."""
    engine.together = threading.Barrier(AT_ONCE)
    assert distill(folder, tmp_path / "out", "--endpoint", engine.address) == 0
    assert list(read_answers(tmp_path / "out")) == oracle
    assert engine.most == AT_ONCE and len(engine.bodies) == len(oracle)
    body = engine.bodies[0]
    assert (body["model"], body["max_tokens"]) == (engine.names[0], NEW)
    assert body["temperature"] == 0.0 and "seed" not in body and body["stop_token_ids"] == EOS
    made = read_provenance(tmp_path / "out")
    tokens = sum(len(row["answer_ids"]) for row in oracle)
    assert (made["rows"], made["answer_tokens"], made["processes"]) == (len(oracle), tokens, 1)
    assert made["engine"] == {"model": engine.names[0], "owned_by": "a test"}
    assert made["endpoint"] is True and made["strategy"] is None and "transformers" in str(made)
    assert "model_fingerprint" not in made and engine.address not in json.dumps(made)
    assert made["measured"]["tau"] is None and made["measured"]["answer_tokens"] == tokens
    assert f"examples: {len(oracle)}" in capsys.readouterr().out


def test_texts_alone_become_tokens_with_the_end_that_the_engine_saw(folder, engine, tmp_path):
    def complete(body: dict[str, Any]) -> tuple[int, Any]:
        ended = len(body["prompt"]) % 2 == 0
        return 200, {"choices": [{"text": "ab?", "finish_reason": "stop" if ended else "length"}]}

    engine.complete = complete
    assert distill(folder, tmp_path / "out", "--endpoint", f"{engine.address}/v1/") == 0
    text, ended = engine.tokenizer.convert_tokens_to_ids([*"ab?"]), Counter()
    for row in read_answers(tmp_path / "out"):
        ends = len(row["prompt_ids"]) % 2 == 0
        assert row["answer_ids"] == (text + EOS[:1] if ends else text)
        ended[ends] += 1
    assert ended[True] and ended[False]


def test_goes_on_where_it_stopped_also_elsewhere_and_with_another_number_at_once(
    folder, engine, oracle, tmp_path, capsys
):
    output, most = tmp_path / "out", len(PROMPTS)
    good = [engine.complete] * 5
    answered = engine.complete
    engine.complete = lambda body: (
        good.pop()(body) if good else (400, {"error": {"message": "out of memory"}})
    )
    assert distill(folder, output, "--endpoint", engine.address) == 2
    error = capsys.readouterr().err
    assert f"{engine.address}/v1/completions refuses" in error and "out of memory" in error
    done = len((output / "answers.jsonl").read_text().splitlines())
    assert 0 < done <= 5
    engine.complete = answered
    again = ("--endpoint", engine.address.replace("127.0.0.1", "localhost"), "--batch-size", "2")
    assert distill(folder, output, *again) == 0
    # Requests that were given up may still arrive.
    assert engine.hosts.count("localhost") == most - done
    assert list(read_answers(output)) == oracle
    assert distill(folder, output, *again) == 0  # finished: nobody is asked
    assert engine.hosts.count("localhost") == most - done
    assert distill(folder, output, *again, "--max-new-tokens", "9") == 2
    assert distill(folder, output, "--strategy", "none") == 2
    assert "holds answers made with other settings" in capsys.readouterr().err


def test_a_busy_engine_is_asked_again_and_not_for_ever(
    folder, engine, oracle, tmp_path, pauses, capsys
):
    engine.failures = [(503, "busy"), (429, {"error": "slowly"}), (500, "")]
    one = ("--endpoint", engine.address, "--batch-size", "1")
    assert distill(folder, tmp_path / "out", *one) == 0
    assert list(read_answers(tmp_path / "out")) == oracle and pauses == [1, 2, 4]
    engine.failures, engine.bodies = [(503, "no\nworker")] * 99, []
    assert distill(folder, tmp_path / "busy", *one) == 2
    assert len(engine.bodies) == RETRIES + 1
    said = f"{engine.address}/v1/completions, {RETRIES + 1} tries: HTTP 503, no worker"
    assert said in capsys.readouterr().err
    assert distill(folder, tmp_path / "away", "--endpoint", "http://127.0.0.1:9/v1") == 2
    assert "http://127.0.0.1:9/v1/models, 6 tries: no answer (Connect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (422, {"detail": "prompt: a string"}, 'refuses the request: HTTP 422, {"detail": "prompt'),
        (200, "<html>", "answers something else than JSON"),
        (200, {"object": "chat"}, "not an answer of /completions"),
        (
            200,
            {"choices": [{"text": "", "finish_reason": "stop", "prompt_token_ids": [7]}]},
            "read other tokens than it was sent",
        ),
        (
            200,
            {"choices": [{"text": "a", "finish_reason": "abort"}]},
            "gave up an answer: finish_reason='abort'",
        ),
    ],
)
def test_other_answers_are_explained(folder, engine, tmp_path, status, reply, message, capsys):
    engine.failures = [(status, reply)] * 4
    assert distill(folder, tmp_path / "out", "--endpoint", engine.address) == 2
    error = capsys.readouterr().err
    assert message in error and engine.address in error and error.count("hf-spec:") == 1


def test_sampling_is_the_command_s_then_the_model_s_with_a_seed_per_prompt(
    folder, engine, tmp_path, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    path = folder / "m" / "generation_config.json"
    before = path.read_text()
    own = {"temperature": 0.3, "top_p": 0.9, "repetition_penalty": 1.2, "min_p": 0.1}
    path.write_text(json.dumps({**json.loads(before), **own, "do_sample": True}))
    try:
        sampled = ("--endpoint", engine.address, "--do-sample", "--temperature", "0.6")
        assert distill(folder, tmp_path / "out", *sampled, "--seed", "3") == 0
        wanted = {
            "temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.2, "min_p": 0.1,
        }  # fmt: skip
        for body in engine.bodies:
            assert {name: body[name] for name in wanted} == wanted
        seeds = {tuple(body["prompt"]): body["seed"] for body in engine.bodies}
        assert len(set(seeds.values())) == len(PROMPTS)
        engine.bodies = []
        assert distill(folder, tmp_path / "greedy", "--endpoint", engine.address) == 0
        assert {body["temperature"] for body in engine.bodies} == {0.0}
        assert {body["repetition_penalty"] for body in engine.bodies} == {1.2}
        assert not any("min_p" in body or "seed" in body for body in engine.bodies)
    finally:
        path.write_text(before)
    assert engine.keys == {"Bearer secret"}
    assert "secret" not in (tmp_path / "out" / "provenance.json").read_text()


def test_the_engine_serves_the_model(folder, engine, tmp_path, capsys):
    engine.names = ["another", "third"]
    assert distill(folder, tmp_path / "out", "--endpoint", engine.address) == 2
    error = capsys.readouterr().err
    assert "serves 'another', 'third', and not " in error and "--served-model-name" in error
    engine.names = ["under this name"]
    assert distill(folder, tmp_path / "out", "--endpoint", engine.address) == 0
    assert {body["model"] for body in engine.bodies} == {"under this name"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategy", "prompt_lookup"], "--strategy with --endpoint"),
        (["--strategy-kwargs", "{}", "--device", "cpu"], "--strategy-kwargs, --device with"),
        (["--adapter", "a", "--threads", "1"], "--adapter, --threads with --endpoint"),
        (["--dtype", "float32"], "--dtype with --endpoint"),
        (["--endpoint", "localhost:8000"], "must be as http://localhost:8000/v1"),
    ],
)
def test_options_of_a_model_that_is_loaded_here_are_refused(
    folder, tmp_path, more, message, capsys
):
    given = ("--endpoint", "http://127.0.0.1:9") if "--endpoint" not in more else ()
    assert distill(folder, tmp_path / "out", *given, *more) == 2
    assert message in capsys.readouterr().err


def test_an_engine_needs_prompts_and_one_process(folder, tmp_path, monkeypatch, capsys):
    alone = ("distill", "--model", str(folder / "m"), "--output", str(tmp_path / "out"))
    assert cli.main([*alone, "--endpoint", "http://127.0.0.1:9"]) == 2
    assert "--endpoint needs --prompts" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert distill(folder, tmp_path / "out", "--endpoint", "http://127.0.0.1:9") == 2
    assert "single process" in capsys.readouterr().err


def test_an_address_may_be_without_its_version():
    assert base_address("http://h:8000") == base_address("http://h:8000/v1/") == "http://h:8000/v1"
    assert base_address("https://h/engines/v1") == "https://h/engines/v1"
