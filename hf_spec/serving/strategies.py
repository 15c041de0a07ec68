"""The strategies that a server offers, and which of them a request gets."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

from transformers import GenerationConfig

import hf_spec
from hf_spec.bench.contenders import Adapter, load_adapters
from hf_spec.core.checks import first_line
from hf_spec.decoding.config import StoredOptions, warn_if_lossy
from hf_spec.decoding.validate import check_request
from hf_spec.methods.registry import get_method


class Strategies:
    """A server's adapters and its default strategy.

    All adapters are active at once, so that requests need no switching: each strategy has its own,
    and one that changes the model (``space`` with ``update="lora"``) changes it for all requests.

    Args:
        adapters: at most one per strategy.
        default: the strategy of requests that name none; None for plain generation.

    Raises:
        ValueError: two adapters are for one strategy, or the default strategy is unknown or lacks
            its adapter.
    """

    def __init__(self, adapters: Iterable[Adapter] = (), default: str | None = None):
        self.adapters: dict[str, Adapter] = {}
        for adapter in adapters:
            other = self.adapters.setdefault(adapter.strategy, adapter)
            if other is not adapter:
                raise ValueError(
                    f"adapters {other.path!r} and {adapter.path!r} are both for strategy "
                    f"{adapter.strategy!r}, by which requests choose: give one of them"
                )
        needs = default is not None and get_method(default).needs_adapter
        if needs and default not in self.adapters:
            raise ValueError(f"strategy {default!r} needs a trained adapter: give --adapter")
        self.default = default

    @property
    def offered(self) -> list[str]:
        """Names that a request can give."""
        known = hf_spec.strategies()
        return [n for n in known if n in self.adapters or not get_method(n).needs_adapter]

    def prepare(self, model: Any, continuous: bool) -> None:
        """Load the adapters when the server starts, and check that their strategies run.

        Warns of stored options that change the answers.

        Args:
            model: the server's only model; None if it loads whatever requests name.
            continuous: whether batching is continuous.

        Raises:
            ValueError: naming what does not go together.
        """
        if continuous and (self.adapters or self.default):
            option = "--adapter" if self.adapters else "--strategy"
            raise ValueError(
                f"{option} with --continuous-batching: its paged cache cannot hold a tree. Leave "
                "one of the two out."
            )
        if model is None:
            if self.adapters:
                raise ValueError(
                    "--adapter needs the model that it was trained for: hf-spec serve MODEL "
                    "--adapter ..."
                )
            return
        if self.adapters:
            load_adapters(model, self.adapters.values())
            model.set_adapter([adapter.name for adapter in self.adapters.values()])
            with suppress(ValueError):  # quantised weights, say: updates then stay beside them
                hf_spec.merge_adapter(model)
        for name in {**self.adapters, **({self.default: None} if self.default else {})}:
            adapter = self.adapters.get(name)
            where = f"strategy {name!r}" if adapter is None else f"adapter {adapter.path!r}"
            try:
                self._check(model, GenerationConfig(assistant_strategy=name))
            except ValueError as error:
                raise ValueError(f"{where}: {first_line(error)}") from error
            if adapter is not None:
                stored = StoredOptions(adapter.options)
                stored.source = adapter.path
                warn_if_lossy(stored, get_method(name).parse_options(adapter.options).lossless)

    def settle(
        self, model: Any, config: GenerationConfig, given: Collection[str], continuous: bool
    ) -> None:
        """Put into a request's config what the server decides: strategy and stored options.

        Where the request names no strategy and has options that the default one refuses, such as
        beam search, it stays plain. ``"assistant_strategy": null`` asks for that.

        Args:
            model: of the request.
            config: of the request; is changed.
            given: options that the request gives itself.
            continuous: whether batching is continuous.

        Raises:
            ValueError: the request cannot be fulfilled.
        """
        if config.assistant_strategy is not None:
            try:
                self._check(model, config, continuous)
            except ValueError as error:
                if config.assistant_strategy in self.offered:
                    raise
                offered = ", ".join(self.offered)
                raise ValueError(
                    f"{error} This server offers {offered}; others need --adapter."
                ) from error
        elif self.default is not None and "assistant_strategy" not in given:
            config.assistant_strategy = self.default
            try:
                self._check(model, config)
            except ValueError:
                if "assistant_kwargs" in given:
                    raise
                self._check(model, GenerationConfig(assistant_strategy=self.default))
                config.assistant_strategy = config.assistant_kwargs = None

    def _check(self, model: Any, config: GenerationConfig, continuous: bool = False) -> None:
        """Add the options stored with the adapter, and raise the errors of ``generate()``."""
        adapter = self.adapters.get(config.assistant_strategy)
        own = config.assistant_kwargs
        if adapter is not None and (own is None or isinstance(own, dict)):
            config.assistant_kwargs = {**adapter.options, **(own or {})}
        check_request(model, config, continuous)
