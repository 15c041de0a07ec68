"""Clients of a server: ``python benchmarks/serving.py`` takes about a minute on the demo model.

A number of clients ask, read streamed answers, pause, and ask again; some go away in the middle of
an answer. Each answer is compared with the one that plain ``generate`` gives alone, greedy in
float32. Time between tokens is from one piece of a stream to the next; tokens that are accepted
together arrive together.

    python benchmarks/serving.py --model M --adapter ./medusa --strategy medusa --seconds 120 \\
        --servers shared turns transformers continuous
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from hf_spec.tools import demo
from hf_spec.tools.bench.prompts import BUNDLED, read_prompts, spread
from hf_spec.tools.loading import load_model

HF_SPEC = [sys.executable, "-m", "hf_spec.tools.cli", "serve"]
TRANSFORMERS = [
    sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve"
]  # fmt: skip
#: The cache of continuous batching, which else takes most of the memory.
PAGED = [
    "--continuous-batching", "--cb-max-batch-tokens", "512", "--cb-num-blocks", "256",
    "--cb-block-size", "32",
]  # fmt: skip
#: Servers by name: their command, whether they take a strategy, and options.
SERVERS = {
    "shared": (HF_SPEC, True, []),
    "turns": (HF_SPEC, True, ["--no-share-steps"]),
    "transformers": (TRANSFORMERS, False, []),
    "continuous": (TRANSFORMERS, False, PAGED),
}
NUM_PROMPTS = 16
PERCENTILES = 50, 95, 99


class Question(NamedTuple):
    """A prompt, most tokens of its answer, and the answer of plain generation."""

    prompt: str
    max_tokens: int
    answer: str


@dataclass
class Results:
    """What clients have seen.

    Attributes:
        first: seconds to the first piece of each answer.
        between: seconds from piece to piece.
        tokens: of the answers that ended.
        answers: those that ended.
        left: those that were left by their client.
        wrong: answers that differ from plain generation's, as far as they went.
        errors: what was raised instead.
        seconds: that all of it took.
    """

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: int = 0
    left: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent do not exceed; 0 of none."""
    ordered = sorted(values)
    place = -(-len(ordered) * percent // 100)
    return ordered[max(int(place) - 1, 0)] if ordered else 0.0


def as_chat(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A question as the prompt that a chat begins with."""
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(chat)


def questions(model: str | None, num_tokens: int) -> list[Question]:
    """What clients ask, and plain generation's answers in float32."""
    if model is None:
        loaded, tokenizer = load_model(str(demo.model_folder()), "float32")
        texts = [row.text for row in read_prompts(demo.PROMPTS)]
    else:
        loaded, tokenizer = load_model(model, "float32")
        texts = [row.text for row in spread(read_prompts(BUNDLED), NUM_PROMPTS)]
        if tokenizer.chat_template is not None:
            texts = [as_chat(tokenizer, text) for text in texts]
    found = []
    for number, text in enumerate(texts):
        size = max(num_tokens - 8 * (number % 4), 1)
        inputs = tokenizer(text, return_tensors="pt").to(loaded.device)
        out = loaded.generate(**inputs, do_sample=False, max_new_tokens=size)
        new = out[0, inputs.input_ids.shape[1] :]
        found.append(Question(text, size, tokenizer.decode(new, skip_special_tokens=True)))
    return found


# -- a server --------------------------------------------------------------------------------------


class Server:
    """A server that answers.

    Attributes:
        address: its address.
        model: name of its model.
    """

    def __init__(self, command: Sequence[str], model: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.model, self.address = model, f"http://127.0.0.1:{port}"
        arguments = "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)
        self.process = subprocess.Popen(
            [*command, model, *arguments], env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def wait(self) -> None:
        """Wait until it answers."""
        while True:
            try:
                urllib.request.urlopen(self.address + "/health", timeout=30).close()
                return
            except OSError as error:
                if self.process.poll() is not None:
                    command = " ".join(map(str, self.process.args))  # type: ignore[arg-type]
                    raise RuntimeError(f"the server has ended: {command}") from error
                time.sleep(0.1)

    def end(self) -> None:
        """End its process."""
        self.process.kill()
        self.process.wait()

    def memory(self) -> float | None:
        """Memory that it has in use, in MiB; None if that cannot be told."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return None
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def pieces(self, question: Question) -> Iterator[str]:
        """The answer's text as it arrives."""
        body = {
            "model": self.model, "prompt": question.prompt, "stream": True,
            "max_tokens": question.max_tokens, "temperature": 0,
        }  # fmt: skip
        asked = urllib.request.Request(
            f"{self.address}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(asked, timeout=600) as stream:
            rest = b""
            while received := stream.read1():
                *events, rest = (rest + received).split(b"\n\n")
                parts = [json.loads(event.removeprefix(b"data: ")) for event in events]
                for part in parts:
                    if "error" in part:
                        raise RuntimeError(part["error"])
                if text := "".join(part["choices"][0].get("text") or "" for part in parts):
                    yield text


@contextmanager
def started(name: str, model: str, strategy: Sequence[str]) -> Iterator[Server]:
    """A server of :data:`SERVERS` that answers."""
    command, takes_strategy, options = SERVERS[name]
    server = Server([*command, *options, *(strategy if takes_strategy else ())], model)
    try:
        server.wait()
        yield server
    finally:
        server.end()


# -- its clients -----------------------------------------------------------------------------------


class Load(NamedTuple):
    """What clients do.

    Attributes:
        clients: their number.
        seconds: after which they ask no more.
        pause: mean seconds between an answer and the next question, exponentially distributed.
        leave: share of the answers in the middle of which clients go away.
    """

    clients: int
    seconds: float
    pause: float
    leave: float


def measure(server: Server, asked: Sequence[Question], load: Load) -> Results:
    """Have clients ask a server."""
    found, lock, begun = Results(), threading.Lock(), time.perf_counter()

    def client(number: int) -> None:
        choose = random.Random(number)
        while time.perf_counter() - begun < load.seconds:
            time.sleep(min(choose.expovariate(1 / load.pause), load.seconds))
            question = choose.choice(asked)
            stays = choose.random() >= load.leave
            most = len(question.answer) if stays else choose.randrange(len(question.answer) + 1)
            ask(server, question, most, found, lock)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(load.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.seconds = time.perf_counter() - begun
    return found


def ask(
    server: Server, question: Question, most: int, found: Results, lock: threading.Lock
) -> None:
    """Read an answer, or the first ``most`` characters of one that is longer."""
    text, times, ended, error = "", [time.perf_counter()], True, None
    try:
        for piece in server.pieces(question):
            times.append(time.perf_counter())
            text += piece
            if most < len(text) < len(question.answer):
                ended = False
                break
    except (OSError, RuntimeError) as raised:
        error = repr(raised)
    with lock:
        if error is not None:
            found.errors.append(error)
            return
        seconds = [after - before for before, after in zip(times, times[1:])]
        found.first += seconds[:1]
        found.between += seconds[1:]
        expected = question.answer if ended else question.answer[: len(text)]
        found.wrong += text != expected
        found.answers += ended
        found.left += not ended
        found.tokens += question.max_tokens * len(text) // max(len(question.answer), 1)


HEADS = (
    "server", "clients", "answers", "left", "wrong", "errors", "tokens/s", "first token, ms",
    "between, ms", "MiB",
)  # fmt: skip


def line(server: str, clients: int, found: Results, memory: float | None) -> str:
    """A line of the table."""
    times = [
        " / ".join(f"{1000 * percentile(values, percent):.0f}" for percent in PERCENTILES)
        for values in (found.first, found.between)
    ]
    cells = (
        server, clients, found.answers, found.left, found.wrong, len(found.errors),
        f"{found.tokens / found.seconds:.0f}", *times, "" if memory is None else f"{memory:.0f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the demo model by default")
    parser.add_argument("--adapter", help="the demo's medusa by default")
    parser.add_argument("--strategy", help="the adapter's by default")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=["shared"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each number of clients")
    parser.add_argument("--new-tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--pause", type=float, default=0.2, help="mean seconds between requests")
    parser.add_argument("--leave", type=float, default=0.1, help="share of answers that are left")
    given = parser.parse_args(arguments)
    adapter = given.adapter
    if given.model is None and given.adapter is None and given.strategy is None:
        adapter = str(demo.SHIPPED / "adapters" / "medusa")
    strategy = [] if adapter is None else ["--adapter", adapter]
    strategy += [] if given.strategy is None else ["--strategy", given.strategy]
    asked = questions(given.model, given.new_tokens)
    print(f"first token and between: percentiles {PERCENTILES}; torch {torch.__version__}")
    print(f"| {' | '.join(HEADS)} |\n|{' --- |' * len(HEADS)}", flush=True)
    for name in given.servers:
        with started(name, given.model or str(demo.model_folder()), strategy) as server:
            for question in asked[:2]:  # it learns how long steps take
                list(server.pieces(question))
            for clients in given.clients:
                found = measure(
                    server, asked, Load(clients, given.seconds, given.pause, given.leave)
                )
                print(line(name, clients, found, server.memory()), flush=True)
                for error in sorted(set(found.errors)):
                    print(f"{name}, {clients} clients: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
