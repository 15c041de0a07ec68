"""What tests give to calls: options that make every step draft, changes for a block of a test."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from covering import EVERY_CASE
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CompileConfig

from hf_spec.core import device as transfer
from hf_spec.core.tree import Tree
from hf_spec.draft.drafter import Drafter
from hf_spec.modeling_patches import per_call
from hf_spec.modeling_patches.per_call import Changes

#: Compiled steps whose code is what was captured.
CAPTURED = {"cache_implementation": "static", "compile_config": CompileConfig(backend="eager")}
#: Layers of a model that a strategy leaves out, or looks into, or that make it repeat itself.
LAYERS = {"layer_skip": 3, "propd": 2, "prompt_lookup": 2}
#: Options of ``propd`` that belong to pruning.
PRUNING = ("prune_top_k", "drafter", "drafter_kwargs")


def experts_are_captured() -> bool:
    """Whether this PyTorch captures the grouped product of experts in float32: 2.13 does not."""
    with FakeTensorMode(), warnings.catch_warnings(action="ignore"):
        rows, experts = torch.zeros(4, 8), torch.zeros(2, 8, 16)
        try:
            torch.nn.functional.grouped_mm(rows, experts, offs=torch.tensor([2, 4]).int())
        except RuntimeError:
            return False
    return True


def drafting(strategy: str, /, **options: Any) -> dict[str, Any]:
    """Keywords of ``generate`` for a strategy that drafts at every step.

    By default the policy decides which steps draft, and it goes by step times. On models of the
    tests' size these are noise: counts of steps would differ from run to run, and a strategy that
    is given up early would be compared with plain generation where it is plain generation.
    """
    given = {"assistant_strategy": strategy, "assistant_kwargs": {"drafting": "always", **options}}
    return {**given, **needed(strategy)}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A default dtype within the block, as of a script that sets one to make models."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def needed(strategy: str) -> dict[str, Any]:
    """Further keywords of ``generate`` without which a strategy cannot run."""
    from conftest import shared

    from hf_spec.methods.registry import get_method

    if not get_method(strategy).needs_assistant:
        return {}
    return {"assistant_model": shared("llama")}


def family(strategy: str) -> Any:
    """What its drafter has in common with those of others."""
    from hf_spec.methods.registry import get_method

    method = get_method(strategy)
    return getattr(method.make, "func", method.make) or method.declares.__base__


def one_of_each_kind() -> list[str]:
    """Strategies that run forwards and draft in different ways; all of them: ``--every-case``."""
    from hf_spec.methods.registry import methods

    if os.environ.get(EVERY_CASE):
        return [*methods()]
    return [
        "layer_skip",
        *{family(name): name for name in methods() if name != "layer_skip"}.values(),
    ]


def without_pruning(spec: dict[str, Any]) -> dict[str, Any]:
    """A strategy's keywords for compiled steps, which cannot prune."""
    given = dict(spec["assistant_kwargs"])
    if given.pop("prune", False):
        given = {name: value for name, value in given.items() if name not in PRUNING}
    return {**spec, "assistant_kwargs": given}


def draft_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the policy chooses: every step drafts as deep as it may, and takes all draft tokens."""
    from hf_spec.draft.policy import Plan, StepPolicy

    monkeypatch.setattr(StepPolicy, "wants_draft", lambda self, lookup=False: True)
    monkeypatch.setattr(StepPolicy, "paused", False)
    monkeypatch.setattr(StepPolicy, "draft_cost", lambda self: -1.0)
    monkeypatch.setattr(StepPolicy, "_best", lambda self, likely, *_: Plan(likely.shape[1] - 1))


@contextmanager
def proposals(drafter: type[Drafter]) -> Iterator[list[tuple[list[int], Tree]]]:
    """Collects what a class of drafters proposes in the block: the first sequence's tokens so far,
    and the trees."""
    seen, propose = [], drafter.propose

    def noted(self: Any, state: Any) -> Tree:
        tree = propose(self, state)
        seen.append((list(state.tokens[0]), tree))
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", noted)
        yield seen


def every_step(settings: dict[str, Any]) -> dict[str, Any]:
    """Keywords of ``generate``; a strategy among them drafts at every step, see above."""
    if settings.get("assistant_strategy") is None:
        return settings
    options = settings.get("assistant_kwargs", {})
    return {**settings, **drafting(settings["assistant_strategy"], **options)}


def configured(config: Any) -> dict[str, Any]:
    """Keywords of ``generate`` for a ``SpecConfig``, whose strategy drafts at every step."""
    spec = drafting(config.assistant_strategy, **config.assistant_kwargs)
    return {"generation_config": config, **spec}


def fingerprint(model: Any) -> Any:
    """Every attribute and hook of every module, by identity, and the model's config."""
    modules = {
        name: (
            {key: id(value) for key, value in vars(module).items()},
            list(module._forward_pre_hooks.items()),
            list(module._forward_hooks.items()),
        )
        for name, module in model.named_modules()
    }
    return modules, model.config.to_dict(), model.config._attn_implementation


@contextmanager
def running(changes: Changes) -> Iterator[None]:
    token = per_call._running.set((*per_call._running.get(), changes))
    try:
        yield
    finally:
        per_call._running.reset(token)


@contextmanager
def added(add: Callable[..., Any], model: Any, *args: Any) -> Iterator[Any]:
    """Forwards of the block with what ``add(model, changes, *args)`` adds; gives its result."""
    changes = Changes()
    result = add(model, changes, *args)
    with running(changes):
        yield result


@contextmanager
def no_forward(model: torch.nn.Module) -> Iterator[None]:
    """Fail if the model, or an encoder in it, runs."""

    def fail(*_: Any) -> None:
        pytest.fail("the model ran before the call was refused")

    hooks = [module.register_forward_pre_hook(fail) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def as_if(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that reads a tensor waits, as with a GPU, or does not."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_spec.") and hasattr(module, "is_async") and module is not transfer:
            monkeypatch.setattr(module, "is_async", lambda device: waits)
