"""A server in a process of its own, and OpenAI's client for it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import forks
import pytest
from transformers.utils.import_utils import is_serve_available

#: ``hf-spec`` offline, where the library for the Hub has been imported.
OFFLINE = """
    import sys
    from huggingface_hub import constants
    constants.HF_HUB_OFFLINE = True
    from hf_spec import cli
    sys.exit(cli.main())
"""


class Server:
    """``hf-spec serve`` with these arguments, on the CPU in fp32, once it answers.

    Args:
        forked: start no new interpreter, see ``forks``.
    """

    def __init__(self, *arguments: str, forked: bool = False):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        command = [
            "serve", *arguments, "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1",
            "--port", str(port),
        ]  # fmt: skip
        self.process: Any
        if forked:
            self.program = forks.Program(OFFLINE, *command)
            self.process = self.program.process
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hf_spec.cli", *command],
                env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while True:
            try:
                self.get("/health")
                break
            except OSError:
                assert self.code() is None and time.monotonic() < deadline, "no start"
                time.sleep(0.1)

    def code(self, timeout: float = 0) -> int | None:
        """The exit code, if it ends within these seconds."""
        if not isinstance(self.process, subprocess.Popen):
            self.process.join(timeout)
            return self.process.exitcode
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.address + path, timeout=30) as answer:
            return answer.read().decode()

    def client(self, **options: Any) -> Any:
        import openai

        options = {"timeout": 120, "max_retries": 0, **options}
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", **options)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the values of a metric with these labels."""
        from prometheus_client.parser import text_string_to_metric_families as parse

        return sum(
            sample.value
            for family in parse(self.get("/metrics"))
            for sample in family.samples
            if sample.name == f"hf_spec_{name}" and labels.items() <= sample.labels.items()
        )

    def wait_for(self, value: float, name: str, **labels: str) -> None:
        """Wait until a metric has a value."""
        deadline = time.monotonic() + 60
        while (found := self.metric(name, **labels)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}"
            time.sleep(0.02)


@contextmanager
def serving(*arguments: str, forked: bool = False) -> Iterator[Server]:
    pytest.importorskip("prometheus_client", reason="needs the packages of hf_spec[serve]")
    if not is_serve_available():
        pytest.skip("needs the packages of hf_spec[serve]")
    server = Server(*arguments, forked=forked)
    try:
        yield server
    finally:
        server.process.kill()
        server.code(timeout=60)


def config(**options: Any) -> dict[str, Any]:
    """Keywords of OpenAI's client for a generation configuration, greedy unless it says so."""
    options = {"do_sample": False, **options}
    return {"extra_body": {"generation_config": json.dumps(options)}}
