"""Checks an installation: versions, devices, and which strategies work on a model."""

from __future__ import annotations

import importlib.metadata
import warnings
from typing import Any

import torch
from packaging.requirements import Requirement

from hf_spec.adapters.active import find_active
from hf_spec.bench.environment import machine, package_version
from hf_spec.core.checks import first_line
from hf_spec.methods.registry import Method, methods

#: Name of the adapter that a model gets for a trial.
LENT = "hf_spec_doctor"


def surroundings() -> dict[str, Any]:
    """Versions, devices, and the missing packages of optional extras."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        **machine(torch.device("cpu") if accelerator is None else accelerator),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "missing": missing(),
    }


def missing() -> dict[str, list[str]]:
    """By extra, its packages that are not installed; extras that lack none are left out."""
    try:
        wanted = importlib.metadata.requires("hf_spec") or []
        extras = importlib.metadata.metadata("hf_spec").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return {}
    found: dict[str, list[str]] = {}
    for extra in extras:
        needed = [Requirement(text) for text in wanted]
        own = [one for one in needed if one.marker and one.marker.evaluate({"extra": extra})]
        absent = [one.name for one in own if package_version(one.name) is None]
        if absent:
            found[extra] = absent
    return found


def supported(model: Any) -> dict[str, str | None]:
    """By strategy, why it does not work on a model; None if it does.

    Each strategy generates a few tokens. One that needs an adapter gets an untrained one, unless an
    adapter of its type is active.

    Args:
        model: a causal language model; its active adapters stay active.
    """
    return {name: _obstacle(model, method) for name, method in methods().items()}


def _obstacle(model: Any, method: Method) -> str | None:
    ids = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    config, lent = method.adapter_config, False
    active = [*model.active_adapters()] if getattr(model, "peft_config", None) else []
    try:
        if config is not None and find_active(model, config.type_name) is None:
            with warnings.catch_warnings(action="ignore"):  # of adapters side by side
                model.add_adapter(config(), LENT)
            lent = True
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
            assistant_strategy=method.name, assistant_kwargs={"fallback": False},
        )  # fmt: skip
    except (ValueError, NotImplementedError) as error:
        return first_line(error)
    finally:
        if lent:
            with warnings.catch_warnings(action="ignore"):
                model.delete_adapter(LENT)
        if active:
            model.set_adapter(active)
    return None
