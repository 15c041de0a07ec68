"""An engine behind an OpenAI-compatible address answers prompts, many at once.

Each prompt is a request to ``/completions`` whose prompt are token ids: the chat template is
applied here, and what the engine reads is what a training learns behind.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub.utils import httpx
from transformers import GenerationConfig

from hf_spec.core.checks import first_line, nearest
from hf_spec.tools.bench.environment import software
from hf_spec.tools.bench.prompts import encode_answer
from hf_spec.tools.loading import load_tokenizer

#: Holds the key of an engine that asks for one, as clients of OpenAI's read it.
API_KEY = "OPENAI_API_KEY"
#: How often a request is repeated, and the statuses for which it is; between two tries are 1, 2, 4,
#: 8 and 16 seconds.
RETRIES = 5
BUSY = (408, 429, 500, 502, 503, 504)
#: Seconds that an answer may take, and a connection.
TIMEOUT = httpx.Timeout(1800, connect=10)
#: Why an answer is over: it ended, or has as many tokens as it may.
ENDED, FULL = "stop", "length"
#: What ``generate`` samples with where neither the command nor the model's own config says it.
DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
#: Further fields of a generation config that engines take in a request.
SENT = ("min_p", "repetition_penalty")


@dataclass(frozen=True)
class ServedModel:
    """What is known here of a model that an engine runs; named as on a model."""

    config: Any
    generation_config: GenerationConfig


class Endpoint:
    """An engine that serves a model.

    Args:
        address: such as ``http://localhost:8000/v1``; ``/v1`` may be left out.
        name: the model's folder or repository, of which config and tokenizer are loaded.
        at_once: most requests at a time.

    Raises:
        ValueError: it is no address of HTTP, or the engine does not serve the model.
        ConnectionError: the engine does not answer.
    """

    processes, is_main = 1, True

    def __init__(self, address: str, name: str, at_once: int):
        self.address, self.at_once = base_address(address), at_once
        key = os.environ.get(API_KEY)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.served = asyncio.run(self._find(name))
        config, self.tokenizer = load_tokenizer(name)
        self.model = ServedModel(config, _generation_config(name, config))

    def weights(self) -> dict[str, Any]:
        """What is known of the weights: they are the engine's."""
        return {}

    def origin(self) -> dict[str, Any]:
        """For the provenance: what answered, and the versions that asked."""
        revision = getattr(self.model.config, "_commit_hash", None)
        return {"engine": self.served, "model_revision": revision, "environment": software()}

    @contextmanager
    def ready(self, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Within the block it can be asked; gives how it drafts, which is not known."""
        self._settings = settings
        yield {}

    def answer(
        self, token_ids: dict[int, list[int]], made: Mapping[int, Any], note: Callable[..., None]
    ) -> None:
        """Have the prompts answered that are not among those made, and note each answer with the
        seconds since the one before."""
        asyncio.run(self._answer({i: ids for i, ids in token_ids.items() if i not in made}, note))

    async def _answer(self, token_ids: dict[int, list[int]], note: Callable[..., None]) -> None:
        left, last = iter(token_ids.items()), time.perf_counter()

        async def work(client: Any) -> None:
            nonlocal last
            for index, ids in left:  # which all workers share
                answer = await self.complete(client, index, ids)
                before, last = last, time.perf_counter()
                note({index: answer}, last - before, None)

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            headers=self._headers, timeout=TIMEOUT, limits=limits
        ) as client:
            workers = [asyncio.create_task(work(client)) for _ in range(self.at_once)]
            try:
                await asyncio.gather(*workers)
            finally:
                for one in workers:
                    one.cancel()

    async def complete(self, client: Any, index: int, prompt_ids: list[int]) -> list[int]:
        """Token ids of the answer to a prompt, with the end-of-sequence token if it ended."""
        ends = _end_ids(self.model.generation_config)
        reply = await self._ask(client, "POST", "completions", {
            "model": self.served["model"], "prompt": prompt_ids,
            "max_tokens": self._settings["max_new_tokens"],
            **_sampling(self.model.generation_config, self._settings, index),
            # Of vLLM and SGLang; others leave out what they do not know.
            "return_token_ids": True, "stop_token_ids": ends, "skip_special_tokens": False,
        })  # fmt: skip
        try:
            (choice,) = reply["choices"]
            text, reason = choice["text"], choice["finish_reason"]
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{self.address}: not an answer of /completions") from error
        read, found = choice.get("prompt_token_ids"), choice.get("token_ids")
        if read is not None and read != prompt_ids:
            raise ValueError(
                f"{self.address} read other tokens than it was sent: it serves another model or "
                "changes prompts"
            )
        if reason not in (ENDED, FULL):
            raise ValueError(f"{self.address} gave up an answer: finish_reason={reason!r}")
        if found is not None:
            first = next((i for i, token in enumerate(found) if token in ends), len(found))
            return list(found[: first + 1])
        if reason == ENDED:
            return encode_answer(self.tokenizer, text)
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    async def _find(self, name: str) -> dict[str, Any]:
        """The name by which the engine serves the model, and whose engine it is: the model of this
        name, or the only one."""
        async with httpx.AsyncClient(headers=self._headers, timeout=TIMEOUT) as client:
            reply = await self._ask(client, "GET", "models")
        try:
            served = {row["id"]: row.get("owned_by") for row in reply["data"]}
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.address}: not an answer of /models") from error
        if name not in served and len(served) != 1:
            raise ValueError(
                f"{self.address} serves {', '.join(map(repr, served)) or 'no model'}, and not "
                f"{name!r}{nearest(name, served)}: start the engine with this name "
                "(--served-model-name)"
            )
        found = name if name in served else next(iter(served))
        return {"model": found, "owned_by": served[found]}

    async def _ask(self, client: Any, method: str, path: str, body: Any = None) -> Any:
        """The engine's answer to a request, which is repeated while it is busy or away."""
        address = f"{self.address}/{path}"
        failure = ""
        for attempt in range(RETRIES + 1):
            if attempt:
                await asyncio.sleep(2 ** (attempt - 1))
            try:
                reply = await client.request(method, address, json=body)
            except httpx.TransportError as error:
                failure = f"no answer ({type(error).__name__}: {first_line(error)})"
                continue
            failure = f"HTTP {reply.status_code}, {_said(reply)}"
            if reply.status_code == 200:
                try:
                    return reply.json()
                except ValueError as error:
                    raise ValueError(f"{address} answers something else than JSON") from error
            if reply.status_code not in BUSY:
                raise ValueError(f"{address} refuses the request: {failure}")
        raise ConnectionError(f"{address}, {RETRIES + 1} tries: {failure}")


def base_address(address: str) -> str:
    """The address that paths such as ``/completions`` follow; a ValueError if it is none."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"--endpoint {address!r}: must be as http://localhost:8000/v1")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def _generation_config(name: str, config: Any) -> GenerationConfig:
    """A model's generation config, made of its config if there is no file."""
    try:
        return GenerationConfig.from_pretrained(name)
    except OSError:
        return GenerationConfig.from_model_config(config)


def _end_ids(config: GenerationConfig) -> list[int]:
    """Tokens that end an answer."""
    ends = config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _sampling(config: GenerationConfig, settings: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Fields of a request that say how tokens are chosen, as ``generate`` would."""
    sent = {name: value for name in SENT if (value := getattr(config, name, None)) is not None}
    if not settings["do_sample"]:
        sent.pop("min_p", None)
        return {"temperature": 0.0, **sent}
    for name, default in DEFAULTS.items():
        own = getattr(config, name, None)
        asked = settings[name]
        sent[name] = asked if asked is not None else default if own is None else own
    # A seed of its own for each prompt, whatever the order in which they are answered.
    return {**sent, "seed": (settings["seed"] * 1_000_003 + index) % 2**31}


def _said(reply: Any) -> str:
    """What an engine says is wrong, in a line."""
    try:
        found = reply.json()
        error = found.get("error", found)
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, AttributeError):
        text = reply.text
    return " ".join(str(text).split())[:300] or "without a reason"
