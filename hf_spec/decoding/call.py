"""What a call asks for: SpecConfig, `auto`, compiling, and all that is refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, CompileConfig, GenerationConfig, PreTrainedModel

from hf_spec.adapters.config import GENERATION
from hf_spec.adapters.layer import Adapter
from hf_spec.adapters.loading import load_unattached, waiting
from hf_spec.cache.attention import SMALLEST
from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.checks import UNFIT, check_count, check_names, explained, first_line, nearest
from hf_spec.draft.drafter import Drafter
from hf_spec.draft.options import ACCEPTANCE_RULES, AUTO, DraftOptions, with_place
from hf_spec.draft.translation import Assistant
from hf_spec.files import is_path, read_json
from hf_spec.methods.registry import Method, get_method, methods
from hf_spec.modeling_patches.attention_masks import check_attention
from hf_spec.modeling_patches.modules import CACHE, unwrapped
from hf_spec.modeling_patches.support import (
    activated_loras,
    averaging_adapters,
    check_cache_stays,
    check_model,
)
from hf_spec.modeling_patches.weights import placement
from hf_spec.target.captures import CUDA_GRAPHS
from hf_spec.target.graphs import Graphs
from hf_spec.target.recording import CallFacts, Recording, is_asked
from hf_spec.threads import memory

# -- ``SpecConfig``: a generation configuration that names a strategy ------------------------------

logger = logging.getLogger(__name__)


class StoredOptions(dict[str, Any]):
    """Options from a repository, and its name; options given by the user replace them."""

    def __init__(self, options: Mapping[str, Any] | None = None, source: str = ""):
        super().__init__(options or {})
        self.source = source


def check_stored(options: Mapping[str, Any], source: str) -> None:
    """Raise a ValueError if options from a repository or folder, or that are to be stored in one,
    name a file, which calls would write to. ``source`` says what they are."""
    where = options.get("lookup_history")
    if isinstance(where, str):
        raise ValueError(
            f"{source}: its lookup_history={where!r} is a file of the machine. Take it out, and "
            "give it in the assistant_kwargs of calls."
        )


def note_source(config: GenerationConfig, source: str) -> None:
    """Record where the options of a loaded configuration came from; see :func:`check_stored`."""
    if isinstance(config.assistant_kwargs, dict):
        check_stored(config.assistant_kwargs, f"the configuration of {source!r}")
        config.assistant_kwargs = StoredOptions(config.assistant_kwargs, source)


@cache  # once per repository
def _warn_of_lossy(source: str, acceptance: str) -> None:
    logger.warning(
        "%s asks for acceptance=%r, which emits other tokens than the model alone would. Pass "
        "assistant_kwargs={'acceptance': 'match', ...} for the model's own.", source, acceptance,
    )  # fmt: skip


def _check_options_of_all(kwargs: dict[str, Any]) -> None:
    """Check the options of a call whose strategy is chosen later, as far as all strategies share
    them; that strategy checks its own."""
    common = [item.name for item in dataclasses.fields(DraftOptions)]
    own = {name for one in methods().values() for name in (*one.option_names, *one.former_names)}
    check_names(
        f"assistant_kwargs: strategy {AUTO!r}", (name for name in kwargs if name not in own), common
    )
    DraftOptions(**{name: value for name, value in kwargs.items() if name in common})


#: Fields that name a strategy and its options.
_NAMING = ("assistant_strategy", "assistant_kwargs")


class SpecConfig(GenerationConfig):
    """A ``GenerationConfig`` with a strategy and its options, checked when it is built.

    Args:
        assistant_strategy: name of a strategy (``hf_spec.strategies()`` lists them), or ``auto``:
            the call's assistant model drafts, else the adapter that the call names, else the active
            adapter, each with the options stored beside it, else MTP layers of the model's own
            checkpoint, else `token_recycling`.
        assistant_kwargs: its options.
        **kwargs: everything a ``GenerationConfig`` takes.

    Raises:
        ValueError: if a strategy, option or value is unknown, or an option of a strategy stands
            beside ``assistant_kwargs`` instead of in it.
    """

    def __init__(
        self,
        assistant_strategy: str | None = None,
        assistant_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        _check_strays(assistant_strategy, kwargs)
        for name in _unknown(kwargs):
            raise ValueError(
                f"SpecConfig has no option {name!r}{nearest(name, _fields())}: give options of "
                "GenerationConfig, and those of the strategy in assistant_kwargs."
            )
        if isinstance(assistant_kwargs, dict):
            assistant_kwargs = with_place(assistant_kwargs)
        if assistant_strategy == AUTO:
            _check_options_of_all(assistant_kwargs or {})
        elif assistant_strategy is not None:
            get_method(assistant_strategy).parse_options(assistant_kwargs)
        elif assistant_kwargs:
            raise ValueError(
                f"assistant_kwargs={assistant_kwargs!r} without assistant_strategy: name the "
                "strategy these options belong to."
            )
        # Set first: the parent's default, _from_model_config=True, loses extra fields on reload.
        kwargs["_from_model_config"] = False
        super().__init__(**kwargs)
        self.assistant_strategy = assistant_strategy
        self.assistant_kwargs = assistant_kwargs or {}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """See ``GenerationConfig``. Unknown fields, which files of others may have, are kept."""
        given = {name for name in config_dict if name not in _NAMING}
        strays = {name: config_dict[name] for name in _unknown(given)}
        known = {name: value for name, value in config_dict.items() if name not in strays}
        found = super().from_dict(known, **kwargs)
        for name, value in strays.items():
            setattr(found[0] if isinstance(found, tuple) else found, name, value)
        return found

    @classmethod
    def from_pretrained(cls, pretrained_model_name: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the configuration of a folder or a repository on the Hub; see ``GenerationConfig``.

        Raises:
            OSError: there is none; the message says whether there is such a folder.
            ValueError: it cannot be read, or names no strategy, as a model's own, and none is given
                as a keyword.
        """
        name = str(pretrained_model_name)
        cannot = f"cannot read a SpecConfig from {name!r}"
        if not Path(name).exists() and is_path(name):
            raise FileNotFoundError(f"{cannot}: there is no such folder")
        plain = not args and not {"config_file_name", "subfolder"} & kwargs.keys()
        if plain and Path(name).is_dir() and not (Path(name) / GENERATION).is_file():
            raise FileNotFoundError(
                f"{cannot}: the folder has no {GENERATION}, so that it is no adapter's"
            )
        file = Path(name, kwargs.get("config_file_name") or GENERATION)
        if file.is_file():
            read_json(file)  # which says what is wrong with it
        try:
            with explained(cannot, ValueError, *UNFIT):
                found = super().from_pretrained(pretrained_model_name, *args, **kwargs)
        except OSError as error:
            if Path(name).exists():
                raise
            raise OSError(
                f"{cannot}: there is no such folder here, and on the Hub: {first_line(error)}"
            ) from error
        config = found[0] if isinstance(found, tuple) else found  # with unused keywords
        if config.assistant_strategy is None and "assistant_strategy" not in kwargs:
            raise ValueError(
                f"{cannot}: its {file.name} names no assistant_strategy, as a model's own does "
                "not. Give an adapter's folder, or the strategy: "
                f"SpecConfig.from_pretrained({name!r}, assistant_strategy={AUTO!r})."
            )
        return found


# -- ``assistant_strategy="auto"``: the strategy that fits what a call has -------------------------

#: What works with every model, and needs nothing.
UNTRAINED = "token_recycling"


@dataclass(frozen=True)
class Choice:
    """What ``assistant_strategy="auto"`` takes.

    Attributes:
        strategy: name of the strategy.
        reason: why this one, in a few words.
        options: those stored beside the adapter that it takes.
        passed: by the strategies that would have come first, why they do not work here.
    """

    strategy: str
    reason: str
    options: StoredOptions = field(default_factory=StoredOptions)
    passed: Mapping[str, str] = field(default_factory=dict)


def choose(model: Any, assistant: Any = None, place: str | None = None) -> Choice:
    """The strategy for a model as it is: with the call's assistant if there is one, else with the
    adapter that the call names, else with the active adapter, else with what the checkpoint brings
    along, else from its own earlier predictions.

    Raises:
        ValueError: adapters of several strategies are active, or the named one cannot be used.
    """
    if assistant is not None:
        name = next(name for name, method in methods().items() if method.needs_assistant)
        return Choice(name, "the call has an assistant model")
    if place is not None:
        named = load_unattached(unwrapped(model), place)
        name = named.config.strategy
        return Choice(name, "the call names its adapter", _stored(named, name))
    found = {name: method.active_adapter(model) for name, method in methods().items()}
    active = {name: own for name, own in found.items() if own is not None}
    if len(active) > 1:
        raise ValueError(
            f"assistant_strategy={AUTO!r}: adapters of {', '.join(active)} are active. Name one "
            "of these strategies, or activate one adapter with model.set_adapter(...)."
        )
    for name, own in active.items():
        return Choice(name, f"its adapter {own.name!r} is active", _stored(own, name))
    passed: dict[str, str] = {}
    for name, method in methods().items():
        if method.included is not None:
            obstacle = _obstacle(model, name, method.included)
            if obstacle is None:
                return Choice(name, "the model's own checkpoint has layers for it", passed=passed)
            passed[name] = obstacle
    attached = waiting(model).items()
    others = "".join(f"; to activate {name!r}, {how}" for name, how in attached)
    return Choice(UNTRAINED, f"it needs no adapter, and none is active{others}", passed=passed)


def resolve_auto(model: Any, config: GenerationConfig, assistant: Any = None) -> None:
    """Put what :func:`choose` says in place of ``auto`` in a call's config; options of the call
    come first."""
    if config.assistant_strategy != AUTO:
        return
    given = config.assistant_kwargs or {}
    place = with_place(given).get("adapter") if isinstance(given, dict) else None
    choice = choose(model, assistant, place)
    config.assistant_strategy = choice.strategy
    if isinstance(given, dict) and choice.options:
        given = get_method(choice.strategy).today(given)
        config.assistant_kwargs = StoredOptions(choice.options | given, choice.options.source)


def _obstacle(model: Any, name: str, included: Any) -> str | None:
    """Why a model's checkpoint does not have what a method needs; asked once."""
    known = memory(model)
    if (AUTO, name) not in known:
        try:
            included(model)
            known[AUTO, name] = None
        except (ValueError, NotImplementedError) as error:
            known[AUTO, name] = first_line(error).removeprefix(f"assistant_strategy={name!r}: ")
    return known[AUTO, name]


def _stored(adapter: Adapter, strategy: str) -> StoredOptions:
    """The options stored beside an adapter's weights; empty if there are none. See
    :func:`check_stored`."""
    found = StoredOptions()
    with suppress(OSError, ValueError, AttributeError):
        origin = adapter.origin
        path = None if origin is None else origin.file(GENERATION)
        data = {} if path is None else read_json(path)
        if origin is not None and data.get("assistant_strategy") == strategy:
            options = get_method(strategy).today(data.get("assistant_kwargs") or {})
            found = StoredOptions(options, origin.place)
    check_stored(found, f"the configuration of {found.source!r}")
    return found


# -- Compiled steps: when a call uses them, and which options they allow ---------------------------
#
# As in Transformers, ``cache_implementation="static"`` requests them. Steps are then compiled on
# accelerators unless ``disable_compile`` is set, and elsewhere only with a ``compile_config``. On
# CUDA they are recorded as CUDA graphs, compiled or not: a ``compile_config`` with the backend
# ``cudagraphs`` compiles nothing, so that it is a request by itself, whatever ``disable_compile``.
# `hf_spec.record` asks for the same in all calls that have no request of their own.

#: Value of ``cache_implementation``.
STATIC = "static"

#: Asks for records.
RECORDED = CompileConfig(backend=CUDA_GRAPHS)
#: Devices for which Transformers compiles by default.
_ACCELERATORS = ("cuda", "xpu", "neuron", "tpu")


def ask_for_compiling(config: GenerationConfig) -> None:
    """Record the request for compiled steps and remove it from the call's config, or else
    Transformers would allocate its own static cache."""
    if config.cache_implementation == STATIC:
        config.cache_implementation = None
        config._static_steps = True


def graphs_for(
    model: Any, config: GenerationConfig, drafter: Drafter, kind: Hashable, call: CallFacts
) -> tuple[Graphs | None, Recording]:
    """Compiled code for a call's steps, None if they are not to be compiled; and whether they are
    recorded.

    Args:
        config: a config that :func:`ask_for_compiling` has processed.
        drafter: the call's; it must not prune where the call asks for compiled steps.
        kind: identifies its forwards: the strategy and its adapter.
        call: what records depend on besides.

    Raises:
        ValueError: if it prunes, if ranks run together, or see :class:`Graphs`.
    """
    compile_config = config.compile_config
    records = compile_config is not None and compile_config.backend == CUDA_GRAPHS
    static = getattr(config, "_static_steps", False)
    by_default = model.device.type in _ACCELERATORS or compile_config is not None
    compiles = static and by_default and not config.disable_compile
    own = kind, drafter.kind_of_forward
    if not (records or compiles):
        recording = Recording.of(model, call)
        return Graphs(model, RECORDED, own, recording) if recording.on else None, recording
    asked = f"cache_implementation={STATIC!r}"
    if records:
        asked = f"compile_config=CompileConfig(backend={CUDA_GRAPHS!r})"
    if call.prunes:
        raise ValueError(
            f"prune=True with {asked}: compiled and recorded steps have fixed shapes, and what is "
            "pruned differs from step to step. Leave one of the two out."
        )
    if call.synced:
        raise ValueError(
            f"synced_gpus=True (FSDP, DeepSpeed's stage 3) with {asked}: new code is tried by "
            "further forwards, for which ranks with other prompts would have to wait. Leave out "
            f"{asked}."
        )
    graphs = Graphs(model, compile_config or CompileConfig(), own)
    graphs.tell = getattr(config, "_tell_made", None)
    return graphs, graphs.recording


def warm_up(
    model: PreTrainedModel,
    *,
    batch_sizes: Sequence[int] | int = (1,),
    max_length: int = SMALLEST,
    generation_config: GenerationConfig | None = None,
    progress: Callable[[int], object] | None = None,
    **kwargs: Any,
) -> int:
    """Compile, or record, in advance what calls with a static cache or a ``compile_config`` run.

    Later calls in the same process compile nothing if they stay within these sizes. With Inductor,
    later processes compile from its cache on disk.

    Args:
        model: a causal language model.
        batch_sizes: that or those of later calls; a batch that shrinks, or that calls share, goes
            through powers of two.
        max_length: largest number of prompt and output tokens; there is a graph for every power of
            two up to it, from 256.
        generation_config: as for ``generate``.
        progress: called with the number of graphs so far after each new graph.
        **kwargs: as for ``generate``: the strategy, its options, ``compile_config``, which on CUDA
            may ask for records (``backend="cudagraphs"``), as :func:`hf_spec.record` does. Without
            either, ``torch.compile`` uses Transformers' defaults. Greedy steps are compiled, and
            with ``do_sample=True`` those of calls that sample.

    Returns:
        The number of graphs that were made.

    Raises:
        ValueError: if a size is below 1, if no strategy is named, or if ``generate`` raises it.
    """
    batch_sizes = [batch_sizes] if isinstance(batch_sizes, int) else batch_sizes
    for size in batch_sizes:
        check_count("batch_sizes", size)
    check_count("max_length", max_length)
    config = copy.deepcopy(generation_config or model.generation_config)
    config._warms_up = True
    given = {
        "compile_config": RECORDED if is_asked(unwrapped(model)) else CompileConfig(),
        "do_sample": False, **kwargs,
        "cache_implementation": STATIC, "max_new_tokens": 8, "eos_token_id": None,
        "return_dict_in_generate": True,
    }  # fmt: skip
    # Transformers warns if it gets both a config and arguments for it.
    for name in [name for name in given if hasattr(config, name)]:
        setattr(config, name, given.pop(name))
    if config.assistant_strategy is None:
        raise ValueError(
            "warm_up without assistant_strategy: name the strategy of later calls, such as "
            "assistant_strategy='prompt_lookup'."
        )
    made, length = 0, SMALLEST
    if progress is not None:
        config._tell_made = lambda number: progress(made + number)
    while True:
        for batch_size in batch_sizes:
            # A prompt that needs buffers of exactly this size.
            device = placement(model).device
            order = torch.arange(max(length // 2 - 8, 8), device=device)
            ids = (1 + order % 2).repeat(batch_size, 1)
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, **given
            )
            made += output.spec_stats.details.get("compiled", {}).get("made", 0)
        if length >= max_length:
            return made
        length *= 2


# -- Refuses unsupported options by name, before any work is done ----------------------------------

_ONE_OF_TWO = "Leave one of the two out (assistant_strategy=None)."
#: Options of other decoding modes, and what to do without them.
_OTHER_MODES = {
    "prompt_lookup_num_tokens": (
        "Give assistant_strategy='prompt_lookup', with assistant_kwargs={'num_draft_tokens': ...} "
        "if its policy is not to choose how many tokens to draft."
    ),
    "max_matching_ngram_size": "Give assistant_kwargs={'max_ngram': ...} to prompt_lookup instead.",
    "use_mtp": "Drop it: assistant_strategy='mtp' drafts with the same layers.",
    "assistant_early_exit": "Drop it: assistant_strategy='layer_skip' drafts with some layers.",
    "speculation_type": "Drop it: the strategy alone names the drafter.",
    **dict.fromkeys(
        ("penalty_alpha", "dola_layers", "low_memory", "assistant_ensemble_weight",
         "constraints", "force_words_ids"), _ONE_OF_TWO,
    ),
}  # fmt: skip
#: Options of stock assisted decoding, of which each call has some value, and what to do instead.
_OF_ASSISTED = {
    "num_assistant_tokens": (
        "Give assistant_kwargs={'num_draft_tokens': ...} instead, or nothing: then a policy "
        "drafts as much as pays."
    ),
    "num_assistant_tokens_schedule": "Drop it: in each step a policy drafts as much as pays.",
    "assistant_confidence_threshold": "Drop it: in each step a policy drafts as much as pays.",
    **dict.fromkeys(
        ("assistant_lookbehind", "target_lookbehind"),
        "Drop it: tokens are translated one by one.",
    ),
}


#: What is wrong, if anything; the option, its value, why it is refused, and what to do.
Refusal = tuple[object, str, Any, str, str]


def validate_call(model: Any, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Raise on every option that ``decode`` would have to ignore; put a strategy for ``auto``, and
    the parsed options for those given.

    Raises:
        ValueError: naming the option, its value and what to do.
    """
    assistant = mode_kwargs.get("assistant_model")
    _check_strays(config.assistant_strategy, vars(config))
    resolve_auto(model, config, assistant)
    method = get_method(config.assistant_strategy)
    given, options = config.assistant_kwargs, method.parse_options(config.assistant_kwargs)
    if isinstance(given, StoredOptions) and not ACCEPTANCE_RULES[options.acceptance]:
        _warn_of_lossy(given.source, options.acceptance)
    config.assistant_kwargs = options
    check_model(model)
    check_attention(model)
    check_cache_stays(model)
    _raise(config, _of_other_modes(model, config, method))
    if method.needs_assistant or assistant is not None:
        drafts = assistant
        if method.needs_assistant:
            tokenizers = mode_kwargs.get("tokenizer"), mode_kwargs.get("assistant_tokenizer")
            drafts = Assistant.of(assistant, *tokenizers)
        method.make_drafter(model, options, drafts)
    _raise(config, _of_the_call(config, mode_kwargs, method))
    _raise(config, _of_the_cache(model, config))
    _raise(config, _of_adapters(model))
    config.use_cache = True  # some models' own default is False
    ask_for_compiling(config)


def check_arguments(model: Any, strategy: Any, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option of a strategy, or a name much like one, is an argument of a
    call of ``generate``, and no argument of ``generate`` or of the model's forward; or if what is
    given as a cache is none. Of a call without a strategy (None), the cache alone is checked."""
    if strategy is None:
        _check_padding(arguments)
        return
    for name in ("cache", "past_key_values"):
        given = arguments.get(name)
        if given is not None and not isinstance(given, Cache):
            remedy = "a DynamicCache, the TreeCache of an earlier call, or no cache"
            if isinstance(getattr(given, CACHE, None), Cache):
                remedy = f"the cache of this output, {name}=output.{CACHE}"
            raise ValueError(f"the given cache is of type {type(given).__name__}. Give {remedy}.")
    forward = inspect.signature(model.forward).parameters
    own = {name: value for name, value in arguments.items() if name not in forward}
    _check_strays(strategy, own)


def _check_padding(arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError if plain generation would go on with a TreeCache, which holds tokens only,
    and a mask that counts their padding as columns of it."""
    given = arguments.get("cache", arguments.get("past_key_values"))
    mask = arguments.get("attention_mask")
    if not isinstance(given, TreeCache) or given.tokens is None or mask is None:
        return
    if not bool(mask[:, : max(map(len, given.tokens))].all()):
        raise ValueError(
            f"attention_mask has padding among the tokens that {CACHE} holds, a TreeCache, which "
            "leaves padding out. Leave it out of input_ids and attention_mask, too, or name a "
            "strategy (assistant_strategy='plain' drafts nothing)."
        )


def _check_strays(strategy: Any, given: Mapping[str, Any]) -> None:
    """Raise a ValueError if names beside a strategy are options of one, or much like one."""
    for name, option in strays_among(given).items():
        typo = "" if name == option else f" (did you mean {option!r}?)"
        raise ValueError(
            f"{name}={given[name]!r}{typo} beside assistant_strategy={strategy!r}: it is an option "
            f"of a strategy. Give assistant_kwargs={{{option!r}: {given[name]!r}}}."
        )


#: How much alike a name and an option are that is taken for it; most pairs of options are less.
ALIKE = 0.9


def strays_among(given: Iterable[str]) -> dict[str, str]:
    """Options of strategies among names of a generation config, or of its arguments, by these
    names, which may be misspelled; fields that a generation config has are none."""
    found = {}
    for name in _unknown(given):
        near = get_close_matches(name, _own_names(), 1, ALIKE)
        found.update(dict.fromkeys([name] if near else [], next(iter(near), "")))
    return found


def _unknown(given: Iterable[str]) -> list[str]:
    """The public names that are no fields of a generation config."""
    return [name for name in given if name not in _fields() and not name.startswith("_")]


@cache
def _fields() -> frozenset[str]:
    """Names of the fields of a generation config."""
    return frozenset(vars(GenerationConfig()))


@cache
def _own_names() -> frozenset[str]:
    """Names of options of strategies that are no options of ``generate``."""
    known = methods().values()
    names = {name for method in known for name in (*method.option_names, *method.former_names)}
    return frozenset(name for name in names if not hasattr(GenerationConfig(), name))


def _raise(config: GenerationConfig, refusals: Iterable[Refusal]) -> None:
    for wrong, option, value, why, remedy in refusals:
        if wrong:
            strategy = config.assistant_strategy
            raise ValueError(
                f"{option}={value!r} with assistant_strategy={strategy!r}: {why} {remedy}"
            )


def _of_other_modes(model: Any, config: GenerationConfig, method: Method) -> Iterator[Refusal]:
    for option in ("num_beams", "num_beam_groups"):
        value = getattr(config, option, None) or 1
        yield value > 1, option, value, "beam search keeps several hypotheses per row.", _ONE_OF_TWO
    for option, remedy in _OTHER_MODES.items():
        value = getattr(config, option, None)
        wrong = value is not None and value is not False
        yield wrong, option, value, "it names another decoding method.", remedy
    defaults, own = GenerationConfig._get_default_generation_params(), model.generation_config
    for option, remedy in _OF_ASSISTED.items():
        if not method.drafter.drafts:
            remedy = "Drop it: this strategy drafts nothing."
        value = getattr(config, option, None)
        asked = value not in (None, defaults.get(option), getattr(own, option, None))
        wrong = asked and not config.is_assistant  # with this, the model drafts for another
        yield wrong, option, value, "it is for stock assisted decoding.", remedy


def _of_the_call(
    config: GenerationConfig, mode_kwargs: dict[str, Any], method: Method
) -> Iterator[Refusal]:
    tokenizer = mode_kwargs.get("assistant_tokenizer")
    why, kind = "no assistant drafts with it.", type(tokenizer).__name__
    wrong = tokenizer is not None and not method.needs_assistant
    yield wrong, "assistant_tokenizer", kind, why, _ONE_OF_TWO
    for option in ("output_attentions", "output_hidden_states"):
        why = "a step runs draft tokens that plain generation never sees."
        remedy = "Run the model on the finished sequence to get them."
        yield getattr(config, option, None), option, True, why, remedy
    scale, why = config.guidance_scale, "classifier-free guidance runs the model token by token."
    yield (scale or 1) != 1, "guidance_scale", scale, why, _ONE_OF_TWO
    mark, why = type(config.watermarking_config).__name__, "its processor keeps a state per call."
    yield "SynthID" in mark, "watermarking_config", mark, why, _ONE_OF_TWO
    why = (
        "ranks with prompts of their own would run modules of the model at different times and "
        "wait for ever."
    )
    remedy = "Choose a strategy whose drafts run none, such as prompt_lookup."
    waits = mode_kwargs.get("synced_gpus") and method.declares.runs
    yield waits, "synced_gpus", True, why, remedy


def _of_the_cache(model: Any, config: GenerationConfig) -> Iterator[Refusal]:
    mixes = any(adapter.peft_type == "XLORA" for adapter in _adapters(model))
    remedy = "Set use_cache=True; in TRL's online DPO, generation_kwargs={'use_cache': True, ...}."
    if mixes:
        remedy = (
            "X-LoRA runs without it, as its scalings depend on the whole text: generate without a "
            "strategy, or with one of its LoRAs alone."
        )
    off = config.use_cache is False and (mixes or model.generation_config.use_cache is not False)
    yield off, "use_cache", False, "tree attention needs the cache.", remedy
    kind, why = config.cache_implementation, "strategies keep a cache of their own (TreeCache)."
    remedy = f"Leave it out, or give {STATIC!r} for compiled steps."
    yield kind not in (None, "dynamic", STATIC), "cache_implementation", kind, why, remedy


def _of_adapters(model: Any) -> Iterator[Refusal]:
    adapters = _adapters(model)
    # PeftModel.generate runs the base model's generate() with its own input preparation.
    caller = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if caller is not model and hasattr(caller, "active_peft_config"):
        adapters.append(caller.active_peft_config)
    remedy = "Disable the adapter, or generate without a strategy."
    for adapter in adapters:
        kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
        why = "prompt-learning adapters put virtual tokens into the cache."
        yield getattr(adapter, "is_prompt_learning", False), "peft_type", kind, why, remedy
    lily = averaging_adapters(model)
    why = (
        f"Lily ({', '.join(lily)}) weights its experts by a mean over all tokens of a forward, "
        "which are other ones in a forward of a tree."
    )
    yield lily, "peft_type", "LILY", why, remedy
    activated = activated_loras(model)
    why = (
        "PEFT applies an activated LoRA to the last tokens of each forward, which are other ones "
        "in a forward of a tree."
    )
    yield activated, "alora_invocation_tokens", ", ".join(activated), why, remedy


def _adapters(model: Any) -> list[Any]:
    return list((getattr(model, "peft_config", None) or {}).values())


def check_strategy(model: Any, config: GenerationConfig) -> None:
    """Raise the ValueErrors that ``generate()`` would raise with this config, without
    generating."""
    config = copy.copy(config)
    validate_call(model, config, {})
    method = get_method(config.assistant_strategy)
    method.make_drafter(model, config.assistant_kwargs)
