"""``hf-spec serve``: what cannot be fulfilled gets 400 and the reason, streamed or not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.import_utils import is_serve_available

import hf_spec
from hf_spec.decoding.validate import check_request

MODEL = Path(hf_spec.__file__).parent / "demo" / "model"
LOOKUP = "prompt_lookup"

#: What a request says besides ``max_new_tokens``, and what the answer to it says.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"assistant_strategy": "nope"}, "'nope' is unknown: choose one of"),
    ({"assistant_strategy": "bita"}, "needs an active adapter of type BITA"),
    ({"assistant_strategy": LOOKUP, "num_beams": 3}, "num_beams=3 with assistant_strategy"),
    ({"assistant_strategy": LOOKUP, "assistant_kwargs": {"max_depth": 0}}, "max_depth=0"),
    ({"assistant_strategy": LOOKUP, "assistant_kwargs": 5}, "give a dict of options"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of a server with the demo's model, in a process of its own."""
    if not is_serve_available():
        pytest.skip("needs the packages of hf_spec[serve]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_spec.cli", "serve", str(MODEL), "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "it did not start"
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def ask(server: str, config: str, stream: bool) -> tuple[int, str]:
    """Status and body of the answer."""
    body = {"prompt": "Once upon a time", "generation_config": config, "stream": stream}
    request = urllib.request.Request(
        f"{server}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("stream", [False, True])
def test_refused_requests_are_told_why(server: str, stream: bool) -> None:
    for options, reason in REFUSED:
        status, body = ask(server, json.dumps({"max_new_tokens": 4, **options}), stream)
        assert status == 400 and reason in json.loads(body)["detail"]
    status, body = ask(server, '{"assistant_strategy": ', stream)
    assert status == 400 and "Expecting value" in json.loads(body)["detail"]


def test_other_requests_are_answered_as_before(server: str) -> None:
    texts = []
    for options in ({}, {"assistant_strategy": LOOKUP}):
        config = json.dumps({"max_new_tokens": 8, "do_sample": False, **options})
        status, body = ask(server, config, stream=False)
        assert status == 200
        texts.append(json.loads(body)["choices"][0]["text"])
        status, body = ask(server, config, stream=True)
        parts = [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: {")]
        assert status == 200
        assert "".join(part["choices"][0].get("text", "") for part in parts) == texts[0]
    assert texts[0] == texts[1]


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
