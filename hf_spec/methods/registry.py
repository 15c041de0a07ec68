"""Methods and their registry.

Methods of hf_spec live in ``hf_spec/methods/<name>.py``, or a folder of that name, and export
``METHOD``; installed packages name theirs by entry points, and programs call
:func:`register_method`. Nothing else in the project names a method: the loop, the command line, the
tests and the documentation list what is registered here.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_spec.adapters.config import SpecPeftConfig
from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.loading import find_active, require_active
from hf_spec.adapters.tuner import Fit, Objective, path_of, register_type
from hf_spec.core.checks import check_choice, check_names, explained, first_line
from hf_spec.core.shapes import TokenTree
from hf_spec.draft.drafter import Drafter
from hf_spec.draft.options import ADAPTIVE, AUTO, DraftOptions, with_place
from hf_spec.draft.predictor import Predictor


@dataclass(frozen=True)
class Method:
    """A strategy.

    Attributes:
        name: value of ``assistant_strategy``, and name of the module.
        summary: one line for listings.
        options: dataclass of ``assistant_kwargs``, derived from :class:`DraftOptions`.
        predictor: class of what its trees grow from; None if ``drafter`` proposes by itself.
        drafter: class of its drafters.
        adapter_config: config class of its PEFT adapter; None if it has none.
        adapter_module: class of what such an adapter learns.
        objective: its training loss, which ``PeftModel.forward`` returns for batches with
            ``anchors``, and in training for ``labels`` alone: a function of base model, active
            adapter and ``TrainingBatch``.
        fit: makes its adapter in one pass over answers without gradients, in place of an objective.
        needs_adapter: whether it cannot run without a trained adapter, which is then the third
            argument of ``predictor``, an :class:`Adapter`.
        included: given a model, loads what its own checkpoint has for the method, without which it
            does not work; raises a ValueError, which says why, if there is nothing. None if it
            needs no such thing.
        needs_assistant: whether the call's assistant model drafts, which is then the third argument
            of ``predictor``.
        make: builds predictor or drafter from the same arguments, where the class alone does not.
        training: defaults of ``transformers.TrainingArguments``; None if nothing is trained.
        num_anchors: default number of trained positions per sequence in a training step.
        formats: module of its released formats, see :mod:`hf_spec.tools.formats`; None if there
            are none.
        wraps: its option that may name another strategy, with whose adapter it then drafts; None if
            there is none.
    """

    name: str
    summary: str
    options: type[DraftOptions]
    predictor: type[Predictor] | None = None
    drafter: type[Drafter] = Drafter
    adapter_config: type[SpecPeftConfig] | None = None
    adapter_module: type[Adapter] | None = None
    objective: Objective | None = None
    fit: type[Fit] | None = None
    needs_adapter: bool = False
    included: Callable[[PreTrainedModel], object] | None = None
    needs_assistant: bool = False
    make: Callable[..., Predictor | Drafter] | None = None
    training: dict[str, Any] | None = None
    num_anchors: int = 64
    formats: str | None = None
    wraps: str | None = None

    @property
    def declares(self) -> type[Predictor] | type[Drafter]:
        """The class that says what the method offers: trees, options, what drafting runs."""
        return self.predictor or self.drafter

    @property
    def peft_type(self) -> str | None:
        """Type of its PEFT adapter; None if it has none."""
        return getattr(self.adapter_config, "type_name", None)

    def active_adapter(self, model: PreTrainedModel, place: str | None = None) -> Adapter | None:
        """Its active adapter on a model, or the one at `place`, as :func:`find_active` says."""
        return None if self.peft_type is None else find_active(model, self.peft_type, place)

    @property
    def card(self) -> Traversable:
        """The section of model cards: ``<name>.md`` beside its adapter's config, if it is there."""
        beside = self.adapter_config or self.declares
        module = sys.modules[beside.__module__]
        if module.__package__:
            return files(module.__package__) / f"{self.name}.md"
        return Path(getattr(module, "__file__", None) or "").parent / f"{self.name}.md"

    @property
    def option_names(self) -> list[str]:
        """Names of the options that it has a use for."""
        names = [item.name for item in dataclasses.fields(self.options)]
        unused = [*self.declares.unused, *(["adapter"] if self.adapter_config is None else [])]
        return [name for name in names if name not in unused]

    @property
    def former_names(self) -> Mapping[str, str]:
        """Today's names of its options by their former ones."""
        return self.options.former_names

    def today(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options with today's names in place of former ones; a ValueError if both are given."""
        former = self.former_names
        for name in former.keys() & options.keys():
            if former[name] in options:
                raise ValueError(
                    f"assistant_kwargs={dict(options)!r}: {name!r} is the former name of "
                    f"{former[name]!r} in strategy {self.name!r}. Give the latter alone."
                )
        return {former.get(name, name): value for name, value in with_place(options).items()}

    def parse_options(self, kwargs: dict[str, Any] | DraftOptions | None) -> DraftOptions:
        """Build and validate the options, unless that has been done.

        Raises:
            ValueError: an option is unknown or invalid, or of no use to the method; the message
                lists the options.
        """
        if isinstance(kwargs, self.options):
            return kwargs
        if kwargs is not None and not isinstance(kwargs, dict):
            raise ValueError(
                f"assistant_kwargs is a {type(kwargs).__name__}: give a dict of options of "
                f"{self.name!r}."
            )
        kwargs = self.today(kwargs or {})
        whose = f"assistant_kwargs: strategy {self.name!r}"
        if "adapter" in kwargs and self.adapter_config is None:
            raise ValueError(
                f"{whose} has no option 'adapter': it needs no adapter. Name the strategy that the "
                f"adapter is for, such as 'medusa', or {AUTO!r}, which finds it."
            )
        check_names(whose, kwargs, self.option_names)
        options = self.options(**kwargs)
        if options.acceptance == "rejection" and not self.declares.can_sample:
            raise ValueError(
                f"acceptance='rejection': draft tokens of {self.name!r} are not sampled from a "
                "distribution. Use acceptance='match', which is exact for them."
            )
        tree, trees = options.tree, self.declares.trees
        ranked = any(trees.values())  # else trees grow by probabilities only
        if ranked and isinstance(tree, Sequence) and not isinstance(tree, str) and tree:
            with explained("tree", ValueError):
                TokenTree.from_paths(tree)
        else:
            check_choice("tree", tree, (ADAPTIVE, *trees), ", or give rank paths" * ranked)
        return options

    def make_drafter(
        self,
        model: PreTrainedModel,
        options: DraftOptions,
        assistant: PreTrainedModel | None = None,
    ) -> Drafter:
        """Build the drafter of a call.

        Raises:
            ValueError: there is an assistant and the method has no use for it, or none although it
                needs one; or the drafter cannot work with the model.
        """
        call = f"assistant_strategy={self.name!r}"
        if not self.needs_assistant and assistant is not None:
            raise ValueError(
                f"assistant_model={type(assistant).__name__} with {call}: this strategy drafts by "
                "itself. Leave one of the two out, or name 'draft_model', with which the assistant "
                "drafts. To let the assistant draft with a strategy, name it in the assistant's "
                "generation_config."
            )
        if self.needs_assistant and assistant is None:
            raise ValueError(
                f"{call} without assistant_model: give the smaller model that drafts, "
                "generate(assistant_model=...)."
            )
        given: tuple[Any, ...] = (assistant,) if self.needs_assistant else ()
        if self.needs_adapter:
            given = (require_active(model, str(self.peft_type), self.name, options.adapter),)
        make: Any = self.make or self.declares
        made = make(model, options, *given)
        if isinstance(made, Predictor):
            made = self.drafter(model, options, made)
        return made


#: The strategy whose candidates join the trees of others.
RECYCLING = "token_recycling"


def recycler(model: PreTrainedModel, options: DraftOptions) -> Predictor:
    """What recycles candidates for the trees of another strategy, with these options."""
    method = get_method(RECYCLING)
    assert method.predictor is not None
    return method.predictor(model, method.options(acceptance=options.acceptance))


_registered: dict[str, Method] = {}


def register_method(method: Method) -> None:
    """Register a method with ``generate()``, and its adapter's type with PEFT.

    Registering the same method again does nothing.

    Raises:
        ValueError: it is no :class:`Method`; or the name, or the type of its adapter, belongs to
            another method; or one of ``adapter_config`` and ``adapter_module`` is missing.
    """
    if not isinstance(method, Method):
        raise ValueError(f"register_method({method!r}): give a hf_spec.Method.")
    own = path_of(method.declares)
    known = path_of(_registered.get(method.name, method).declares)
    if known != own:  # else a reloaded module may register it again
        raise ValueError(
            f"the strategy {method.name!r} is that of {known}: choose another name for that of "
            f"{own}."
        )
    if (method.adapter_config is None) != (method.adapter_module is None):
        raise ValueError(
            f"the method {method.name!r} has only one of adapter_config and adapter_module: give "
            "both, or none if it has no adapter."
        )
    if method.adapter_config is not None and method.adapter_module is not None:
        register_type(
            method.adapter_config, method.adapter_module, method.objective, method.num_anchors
        )
        method.adapter_config.strategy = method.name
    _registered[method.name] = method


@cache
def _discover() -> list[EntryPoint]:
    """Register the method of every module of ``hf_spec.methods`` but this one. Those that other
    packages name by entry points of this group are left to :func:`_load`."""
    import hf_spec.methods as package

    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if info.name != __name__:
            register_method(importlib.import_module(info.name).METHOD)
    return list(entry_points(group=package.__name__))


def _load(left: list[EntryPoint]) -> None:
    """Register the methods of other packages that are left. One that its module, which is being
    imported and has imported hf_spec, does not have yet is left until the next time."""
    later = []
    while left:
        entry = left.pop()
        module = sys.modules.get(entry.module)
        if module is not None and not hasattr(module, entry.attr.partition(".")[0]):
            later.append(entry)
            continue
        try:
            register_method(entry.load())
        except Exception as error:  # whatever is wrong with it, the other methods work
            warnings.warn(
                f"the strategy {entry.name!r} of an installed package is left out: {entry.value} "
                f"cannot be registered: {first_line(error)}",
                stacklevel=2,
            )
    left += later


def methods() -> dict[str, Method]:
    """All methods by name."""
    if left := _discover():
        _load(left)
    return dict(sorted(_registered.items()))


def get_method(name: str) -> Method:
    """The method of this name.

    Raises:
        ValueError: there is none; the message lists the strategies.
    """
    check_choice("assistant_strategy", name, (*methods(), AUTO))
    return methods()[name]
