"""Runs benchmarks: sessions of one model, contenders in turns."""

import copy
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import torch
from peft import PeftModel
from torch._dynamo.utils import counters
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import ContinuousBatchingConfig

import hf_spec
from hf_spec.adapters.loading import active_names, fine_tunes
from hf_spec.core.checks import check_count, explained
from hf_spec.core.stats import SpecStats, synchronize
from hf_spec.decoding.sequences import eos_ids, pad_left
from hf_spec.modeling_patches.modules import unwrapped
from hf_spec.modeling_patches.weights import placement
from hf_spec.predict.recycling import learned_table
from hf_spec.target.captures import CUDA_GRAPHS, check_recording
from hf_spec.target.packed_weights import packed_weights
from hf_spec.threads import exchange
from hf_spec.tools.bench.contenders import (
    BASELINE,
    RATES,
    STOCK_BATCHES,
    Contender,
    SyntheticRates,
    contender_of,
    needs_assistant,
    parse_names,
    with_compiled,
    with_continuous,
)
from hf_spec.tools.bench.prompts import batches, encode, encode_prompts, next_turn, spread
from hf_spec.tools.bench.results import Agreement, BenchResult, Measurement, classify
from hf_spec.tools.data import ALL, Prompt, Row, example, progress_bar

T = TypeVar("T")
#: New tokens of a warm-up call: several steps of every strategy.
WARMUP_TOKENS = 16
#: Most repetitions of a call that still compiles something, as the policy tries tree sizes.
MOST_COMPILING = 16
#: Tokens of a forward of Transformers' continuous batching, and of a page of its cache.
BATCH_TOKENS, PAGE = 512, 32
#: Fields of a model's generation config that name a strategy; those of sampling, which greedy runs
#: clear.
STRATEGY_FIELDS = ("assistant_strategy", "assistant_kwargs", "prompt_lookup_num_tokens")
SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip


def _generation_config(model: Any, tokenizer: Any, greedy: bool, ends: bool) -> Any:
    """The model's default generation config without a strategy and, if greedy, without sampling;
    and unless texts end, without EOS."""
    config = copy.deepcopy(model.generation_config)
    for name in (*STRATEGY_FIELDS, *(SAMPLING_FIELDS if greedy else ())):
        if getattr(config, name, None) is not None:
            setattr(config, name, None)
    config.do_sample = config.do_sample and not greedy
    choices = (config.pad_token_id, tokenizer.pad_token_id, *eos_ids(config), 0)
    config.pad_token_id = next(choice for choice in choices if choice is not None)
    if not ends:
        config.eos_token_id = None
    return config


class Turn(NamedTuple):
    """Prompts that these contenders generate one after the other, in batches of ``size``: one batch
    of at most so many, or all prompts where some contender is continuous."""

    size: int
    contenders: list[Contender]
    indices: list[int]

    def parts(self, contender: Contender) -> list[list[int]]:
        """The prompts of each of a contender's calls."""
        size = len(self.indices) if contender.continuous else self.size
        return [self.indices[at : at + size] for at in range(0, len(self.indices), size)]

    def num_calls(self, prompts: Sequence[Prompt]) -> int:
        """Calls until the longest conversation has ended."""
        later = {index: len(prompts[index].later) for index in self.indices}
        rounds = [
            self._replace(indices=[index for index in later if later[index] >= number])
            for number in range(1 + max(later.values()))
        ]
        return sum(len(turn.parts(item)) for turn in rounds for item in self.contenders)


def rotated(items: list[T], number: int) -> list[T]:
    """The order of a turn, which another one begins each time."""
    start = number % max(len(items), 1)
    return items[start:] + items[:start]


@dataclass
class Session:
    """The model, and what all calls share.

    Attributes:
        options: keyword arguments of every call.
        managed: whether adapters are switched before every call, as some contender has one.
            Otherwise the caller's active adapters stay active.
        kept: the adapters that are active in every call, those of :func:`fine_tunes`.
        unmerged: by contender, why its adapter could not be merged into the weights.
        compiling: by contender, the number of calls that compiled something, and their seconds.
        learned: by contender, what its calls have learned of the model; none sees another's.
    """

    model: Any
    options: dict[str, Any]
    managed: bool
    kept: list[str]
    unmerged: dict[str, str] = field(default_factory=dict)
    compiling: dict[str, tuple[int, float]] = field(default_factory=dict)
    learned: defaultdict[str, dict[Hashable, Any]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    @classmethod
    @contextmanager
    def open(
        cls, model: Any, tokenizer: Any, options: dict[str, Any], contenders: Iterable[Contender],
        ends: bool = True,
    ) -> Iterator[Self]:  # fmt: skip
        """A session for these contenders; the block ends with the model as it was. ``ends``:
        whether texts end with EOS, and not only with ``max_new_tokens``."""
        managed, before = any(item.adapters for item in contenders), active_names(model)
        session = cls(model, options, managed, fine_tunes(model))
        saved = model.generation_config
        greedy = not options["do_sample"]
        model.generation_config = _generation_config(model, tokenizer, greedy, ends)
        try:
            yield session
        finally:
            model.generation_config = saved
            if session.managed:
                hf_spec.unmerge_adapter(model)
                session._set(sorted(before))

    def _set(self, names: list[str]) -> None:
        """Activate these adapters, and no others."""
        if not names:
            self.model.disable_adapters()
        else:
            self.model.enable_adapters()
            self.model.set_adapter(names)

    def activate(self, contender: Contender) -> None:
        """Activate the contender's adapters, or none, beside those that are kept."""
        if not self.managed:
            return
        self._set([*self.kept, *contender.adapters])
        if contender.adapters:
            try:  # updates are merged into the weights, as for serving, where that is possible
                hf_spec.merge_adapter(self.model)
            except ValueError as error:
                self.unmerged.setdefault(contender.name, str(error))

    def notes(self) -> list[str]:
        """What is to be known of the calls."""
        return [
            f"{name} compiled in {count} calls of {seconds:.0f} seconds in all, which are left out"
            for name, (count, seconds) in self.compiling.items()
        ] + [
            f"{name} ran with its update beside the weights: {reason}"
            for name, reason in self.unmerged.items()
        ]

    def warm_up(self, plan: Sequence[Turn], token_ids: Sequence[list[int]]) -> None:
        """Make a short call of each contender at each batch size, which fails early."""
        short = min(self.options["max_new_tokens"], WARMUP_TOKENS)
        for turn in {turn.size: turn for turn in reversed(plan)}.values():
            for item in turn.contenders:
                with explained(item.name, ValueError, TypeError, RuntimeError, NotImplementedError):
                    # Other texts than those that are measured, which tables would know then.
                    batch = [token_ids[index][::-1] for index in turn.indices[: turn.size + 1]]
                    batch = batch if item.continuous else batch[: turn.size]
                    self.generate(item, batch, turn.size, max_new_tokens=short)

    def generate(
        self, contender: Contender, prompts: Sequence[list[int]], most: int | None = None,
        **overrides: Any,
    ) -> tuple[float, list[list[int]], int, SpecStats | None]:  # fmt: skip
        """One timed call with token ids of prompts, of which a continuous contender runs ``most``
        at once; ``overrides`` are arguments of ``generate``.

        Returns:
            Seconds, new tokens of each sequence, forward passes counted once per unfinished
            sequence, and statistics (None for a stock contender).
        """
        self.activate(contender)
        model = self.model
        inputs = pad_left(prompts, model.generation_config.pad_token_id, model.device)
        kwargs = {**self.options, **contender.kwargs, **overrides}
        if contender.continuous:
            kwargs["assistant_kwargs"] = {**kwargs.get("assistant_kwargs", {}), "max_rows": most}
        random, table = torch.get_rng_state(), self._table(contender)
        learned = [one.clone() for one in table]
        for _ in range(MOST_COMPILING):
            torch.set_rng_state(random)
            known = counters["stats"]["unique_graphs"]  # of Transformers; hf_spec counts its own
            seconds, sequences, forwards, stats = self._timed(contender, inputs, kwargs)
            made = counters["stats"]["unique_graphs"] - known
            made += 0 if stats is None else stats.details.get("compiled", {}).get("made", 0)
            if not made:
                break
            calls, before = self.compiling.get(contender.name, (0, 0.0))
            self.compiling[contender.name] = calls + 1, before + seconds
            for one, was in zip(table, learned):  # the call that counts knows no answer
                one.copy_(was)
        width = inputs["input_ids"].shape[1]
        eos = set(eos_ids(model.generation_config))
        rows = [_until_eos(row, eos) for row in sequences[:, width:].tolist()]
        if stats is None:
            # The forward passes of a sequence end with its last token, not with the batch.
            most = sequences.shape[1] - width if forwards is None else forwards
            return seconds, rows, sum(min(most, len(row)) for row in rows), None
        return seconds, rows, stats.num_row_steps, stats

    def _table(self, contender: Contender) -> Sequence[torch.Tensor]:
        """What a contender's earlier calls have put into its table, if they keep one."""
        base = unwrapped(self.model)
        others = exchange(base, self.learned[contender.name])
        try:
            table = learned_table(base)
        finally:
            exchange(base, others)
        return [] if table is None else table.tensors()

    def _timed(
        self, contender: Contender, inputs: dict[str, torch.Tensor], kwargs: dict[str, Any]
    ) -> tuple[float, torch.Tensor, int | None, SpecStats | None]:
        """Seconds, sequences, and either forward passes (stock contenders) or statistics."""
        model, forwards = self.model, 0
        before = hf_spec.last_stats(model)

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1

        # hf_spec's strategies count their own, as some call the model to draft, too. Compiled code
        # runs no hooks, and makes one forward pass per token.
        counts = contender.stock and not (contender.compiled or contender.continuous)
        generate = model.generate
        if contender.stock and contender.continuous:
            generate = partial(continuous, model)
        base = unwrapped(model)
        others = exchange(base, self.learned[contender.name])
        hook = model.register_forward_hook(count) if counts else None
        try:
            synchronize(model.device)
            start = time.perf_counter()
            sequences = generate(**inputs, **kwargs)
            synchronize(model.device)
            seconds = time.perf_counter() - start
        finally:
            exchange(base, others)
            if hook is not None:
                hook.remove()
        if contender.stock:
            return seconds, sequences, forwards if counts else None, None
        stats = hf_spec.last_stats(model)
        if stats is None or stats is before:
            raise RuntimeError("generate() left no statistics: the strategy did not run")
        return seconds, sequences, None, stats


def continuous(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor,
    assistant_kwargs: Mapping[str, Any], **options: Any,
) -> torch.Tensor:  # fmt: skip
    """``(batch, seq)`` what Transformers' continuous batching makes of left-padded prompts
    ``(batch, width)``, padded to the longest answer; ``max_rows`` of the arguments run at once."""
    config, most = copy.deepcopy(model.generation_config), assistant_kwargs["max_rows"]
    config.update(**options)
    rows, width = input_ids.shape
    # A cache for what runs at once; else it takes most of the memory.
    pages = -(-(width + options["max_new_tokens"]) // PAGE) + 1
    page = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=most, num_blocks=most * pages,
        max_batch_tokens=max(most, BATCH_TOKENS), **{page: PAGE},
    )  # fmt: skip
    prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask)]
    found = model.generate_batch(prompts, config, batching, warmup=False)
    if failed := next((one.error for one in found.values() if one.error), None):
        raise RuntimeError(f"{STOCK_BATCHES}: {failed}")
    answers = [torch.tensor(one.generated_tokens, dtype=torch.long) for one in found.values()]
    padded = torch.nn.utils.rnn.pad_sequence(answers, True, float(config.pad_token_id or 0))
    if len(padded) != rows:
        raise RuntimeError(f"{STOCK_BATCHES} answered {len(padded)} of {rows} prompts")
    return torch.cat([input_ids, padded.to(input_ids.device)], 1)


def _until_eos(row: Sequence[int], eos: set[int]) -> list[int]:
    """The sequence up to and including its first EOS; what follows is padding."""
    end = next((index for index, token in enumerate(row) if token in eos), len(row))
    return list(row[: end + 1])


def run(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], contenders: Sequence[Contender], *,
    batch_sizes: Sequence[int] = (1,), max_new_tokens: int = 128, limit: int | None = None,
    generate_kwargs: Mapping[str, Any] | None = None, seed: int = 0, compiled: str | None = None,
    synthetic: SyntheticRates | None = None, protocol: Mapping[str, Any] | None = None,
    title: str = "benchmark", continuous: bool = False,
    seen: Callable[[Measurement], None] | None = None,
) -> BenchResult:  # fmt: skip
    """Generate with plain decoding and every contender, and compare.

    All generate each batch of prompts one after the other, in an order that rotates from batch to
    batch, so that changes in the machine's speed affect all alike. Each contender first makes a
    short call that is not measured. On ``KeyboardInterrupt``, the batches that all contenders have
    finished are returned, and ``interrupted`` is set.

    Where users say more after an answer (``Prompt.later``), that is the plain one, so that all
    contenders are asked the same.

    Args:
        limit: most prompts that are measured, see :func:`hf_spec.tools.bench.prompts.spread`.
        generate_kwargs: passed to every ``generate``; greedy unless ``do_sample`` is among them.
        seed: seed for the sampling of the first batch, the same for all contenders; the next
            batches count up from it.
        compiled: a backend of ``torch.compile``, with which contenders take part a second time,
            with a static cache and compiled steps; None for none. Calls that compile are repeated
            and counted apart.
        synthetic: rates at which drafts are accepted, whatever they are; None to let the model
            decide. All calls then emit ``max_new_tokens``, and outputs are not compared.
        protocol: what is recorded of a suite (:func:`hf_spec.tools.bench.prompts.protocol`), whose
            groups of prompts then have the same weight; None if there is none.
        continuous: also have each strategy, and Transformers' ``generate_batch``, admit rows as
            others end, at most as many as a batch has. Batches then mix categories, and there are
            figures of all prompts alone.
        title: of the progress bar, which counts calls, without those that prepare.
        seen: gets each measurement as it is made, before outputs are compared, instead of the bar.
    """
    _check(prompts, contenders, batch_sizes, max_new_tokens, limit, synthetic)
    if continuous and (compiled or synthetic is not None):
        raise ValueError(
            f"continuous batches with {'compiled steps' if compiled else RATES}: rows are not "
            "admitted there. Leave one out."
        )
    if compiled == CUDA_GRAPHS:
        check_recording(placement(model).device, {})  # at once, not after plain generation
    if continuous and protocol is not None:
        raise ValueError(
            "continuous batches with a suite: they mix its groups, which have figures of their "
            "own. Leave one out."
        )
    contenders = [BASELINE, *contenders]
    contenders = with_continuous(contenders) if continuous else contenders
    options = {"do_sample": False, **(generate_kwargs or {}), "max_new_tokens": max_new_tokens}
    prompts = spread(prompts, limit)
    token_ids, truncated = encode_prompts(model, tokenizer, prompts, max_new_tokens)
    if compiled:
        longest = max(map(_most_tokens(tokenizer, max_new_tokens), prompts, token_ids))
        contenders = with_compiled(contenders, compiled, longest)
    settings = {
        **options, "batch_sizes": list(batch_sizes), "seed": seed,
        "synthetic_acceptance": None if synthetic is None else list(synthetic.rates),
        "packed_bytes": sum(copies.num_bytes for copies in packed_weights(model)),
        "protocol": None if protocol is None else dict(protocol),
        "strategies": {item.name: item.settings for item in contenders},
    }  # fmt: skip
    result = BenchResult(list(prompts), contenders, settings, truncated_prompts=truncated)
    plan = [turn for size in batch_sizes for turn in _turns(result, size, continuous)]
    calls, done = sum(turn.num_calls(prompts) for turn in plan), 0
    rule = nullcontext() if synthetic is None else synthetic.of(model)
    opened = Session.open(model, tokenizer, options, contenders, synthetic is None)
    with opened as session, rule, progress_bar(title, seen is None) as progress:
        try:
            session.warm_up(plan, token_ids)
            progress(0, calls)
            for number, turn in enumerate(plan):
                asked = {item.baseline: _Asked(prompts, token_ids) for item in turn.contenders}
                task = ALL if continuous else prompts[turn.indices[0]].category
                while turn.indices:
                    outcome: dict[str, list[Measurement]] = {}
                    for item in rotated(turn.contenders, number):
                        torch.manual_seed(seed + number)
                        for part in turn.parts(item):
                            batch = [asked[item.baseline].token_ids[index] for index in part]
                            made = Measurement(
                                item.name, turn.size, part, task,
                                *session.generate(item, batch, turn.size), baseline=item.baseline,
                            )  # fmt: skip
                            outcome.setdefault(item.name, []).append(made)
                            done += 1
                            progress(done, calls)
                            if seen is not None:
                                seen(made)
                    _compare(session, outcome, asked, turn, synthetic is not None)
                    for item in turn.contenders:
                        result.measurements += outcome[item.name]
                    one = next(iter(asked.values()))
                    turn = turn._replace(indices=[i for i in turn.indices if one.prompts[i].later])
                    for name, own in asked.items():
                        cut = own.go_on(model, tokenizer, outcome[name], turn, max_new_tokens)
                        result.truncated_prompts += cut if own is one else 0
            result.notes += session.notes()
        except KeyboardInterrupt:
            result.interrupted = True
            result.notes.append(f"interrupted after {done} of {calls} calls")
    if result.truncated_prompts:
        questions = sum(1 + len(prompt.later) for prompt in prompts)
        result.notes.insert(
            0,
            f"{result.truncated_prompts} of {questions} prompts did not fit the model's context "
            "and were cut at their beginning",
        )
    return result


class _Asked:
    """What is asked next in each conversation, which goes on with the answers of one baseline."""

    def __init__(self, prompts: Sequence[Prompt], token_ids: Sequence[list[int]]):
        self.prompts, self.token_ids = [*prompts], [*token_ids]

    def go_on(
        self, model: Any, tokenizer: Any, answers: Sequence[Measurement], turn: Turn,
        new_tokens: int,
    ) -> int:  # fmt: skip
        """Ask the next question of these conversations, after the answers to those before; returns
        the number of prompts that were cut."""
        rows = {at: row for made in answers for at, row in zip(made.prompts, made.rows)}
        for index in turn.indices:
            answer = tokenizer.decode(rows[index], skip_special_tokens=True)
            self.prompts[index] = next_turn(self.prompts[index], answer)
        now = [self.prompts[index] for index in turn.indices]
        found, cut = encode_prompts(model, tokenizer, now, new_tokens)
        for index, ids in zip(turn.indices, found):
            self.token_ids[index] = ids
        return cut


def _most_tokens(tokenizer: Any, new_tokens: int) -> Callable[[Prompt, list[int]], int]:
    """A function that bounds the tokens of a conversation with its answers."""

    def most(prompt: Prompt, token_ids: list[int]) -> int:
        later = sum(len(encode(tokenizer, text)) for text in prompt.later)
        return len(token_ids) + later + (1 + len(prompt.later)) * new_tokens

    return most


def _check(
    prompts: Sequence[Prompt], contenders: Sequence[Contender], batch_sizes: Sequence[int],
    max_new_tokens: int, limit: int | None, synthetic: SyntheticRates | None,
) -> None:  # fmt: skip
    """Raise a ValueError if there is nothing to measure, or it cannot be."""
    if not prompts:
        raise ValueError("nothing to measure: no prompts")
    check_count("max_new_tokens", max_new_tokens)
    if limit is not None:
        check_count("limit", limit)
    for size in batch_sizes or (0,):
        check_count("batch_size", size)
    stock = [item.name for item in contenders if item.single_row]
    if synthetic and stock:
        raise ValueError(f"{stock[0]} accepts by itself, not by {RATES}: leave it out")


def _turns(result: BenchResult, size: int, continuous: bool) -> list[Turn]:
    """The batches of a size, or ``continuous`` ones; the result's notes say what is left out or not
    full."""
    taking_part = [item for item in result.contenders if size == 1 or not item.single_row]
    for item in result.contenders:
        if item not in taking_part:
            result.notes.append(f"{item.name} left out at batch size {size}: it takes one row")
    if continuous:
        return [Turn(size, taking_part, list(range(len(result.prompts))))]
    parts = list(batches(result.prompts, size))
    if small := sum(len(part) < size for part in parts):
        result.notes.append(
            f"{small} of {len(parts)} batches have fewer than {size} rows: a batch never mixes "
            "categories"
        )
    return [Turn(size, taking_part, part) for part in parts]


def _compare(
    session: Session, outcome: Mapping[str, Sequence[Measurement]], asked: Mapping[str, _Asked],
    turn: Turn, synthetic: bool,
) -> None:  # fmt: skip
    """Set the ``agreement`` of every measurement with its baseline, where outputs can be compared:
    greedy ones, and samples of the same seed, which rounding may make differ; of ``synthetic``
    acceptance those of baselines alone."""
    if synthetic:
        outcome = {name: made for name, made in outcome.items() if name == made[0].baseline}
    plain = {
        (name, index): row
        for name, made in outcome.items()
        for one in made
        for index, row in zip(one.prompts, one.rows)
    }
    measured = [one for made in outcome.values() for one in made]
    if session.options["do_sample"]:
        # Of continuous batches, each row has random numbers of its own.
        alone = turn.size == 1 and not any(item.continuous for item in turn.contenders)
        for one in measured if alone else ():
            pairs = ((row, plain[one.baseline, at]) for at, row in zip(one.prompts, one.rows))
            one.agreement = [Agreement.IDENTICAL if a == b else None for a, b in pairs]
        return
    default = session.model.generation_config.repetition_penalty
    penalty = session.options.get("repetition_penalty", default)
    plains = {item.name: item for item in turn.contenders if item.name == item.baseline}
    for item in sorted(measured, key=lambda item: item.baseline):
        session.activate(plains[item.baseline])
        token_ids = asked[item.baseline].token_ids
        item.agreement = [
            classify(session.model, token_ids[index], ours, plain[item.baseline, index], penalty)
            for index, ours in zip(item.prompts, item.rows)
        ]


# -- ``hf_spec.benchmark``: ``hf-spec bench`` for models that are in memory ------------------------

#: A prompt: a text, a chat as a list of messages, or a row of a data set.
GivenPrompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
#: Arguments of ``generate`` that are not the same in all calls, or change what a call returns.
NOT_OF_ALL = {
    "assistant_kwargs", "assistant_strategy", "attention_mask", "custom_generate",
    "generation_config", "input_ids", "inputs", "num_return_sequences", "prompt_lookup_num_tokens",
    "return_dict_in_generate", "streamer",
}  # fmt: skip


def benchmark(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[GivenPrompt],
    strategies: str | Iterable[str] | Mapping[str, Mapping[str, Any]] = "auto",
    *,
    max_new_tokens: int = 128,
    batch_size: int | Sequence[int] = 1,
    continuous: bool = False,
    assistant_model: PreTrainedModel | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    limit: int | None = None,
    seed: int = 0,
    backend: str | None = None,
    **generate_kwargs: Any,
) -> BenchResult:
    """Measure strategies against plain ``generate`` on the same prompts.

    All take turns prompt by prompt in this process, after a short call each that is not measured,
    so that a machine that slows down slows all of them. Decoding is greedy unless
    ``do_sample=True``; then all draw the same random numbers. The model's active adapters stay as
    they are, also for plain ``generate``. ``hf-spec bench`` measures models and adapters by name
    with the same code.

    ```python
    result = hf_spec.benchmark(model, tokenizer, ["What is a llama?"], ["prompt_lookup", "medusa"])
    print(result)  # the table
    result.to_pandas()
    ```

    Args:
        model: a causal language model, with the adapters that draft.
        tokenizer: its tokenizer. Its chat template is applied if it has one.
        prompts: texts; chats, as lists of ``{"role": ..., "content": ...}`` that end with the
            user's; or rows of a data set such as ``{"prompt": ..., "category": ...}``, with the
            fields that ``hf-spec bench --prompts`` reads. Prompts longer than the model's context
            are cut at the beginning.
        strategies: names of strategies, ``transformers:prompt_lookup`` and
            ``transformers:assisted`` included; or their options by name:
            ``{"medusa": {}, "medusa:few": {"num_draft_tokens": 4}}``, where what follows the colon
            is a label.
        max_new_tokens: most new tokens of each prompt.
        batch_size: prompts per call, or several such numbers. Batches do not mix categories.
        continuous: also measure each strategy, and Transformers' ``generate_batch``, with rows that
            are admitted as others end, at most ``batch_size`` at once; batches mix categories then.
        assistant_model: drafts for ``draft_model`` and ``transformers:assisted``.
        assistant_tokenizer: its tokenizer, if it is another one.
        limit: most prompts that are measured, spread evenly over categories.
        seed: of the sampling.
        backend: measures compiled or recorded steps, too: ``"cudagraphs"`` records them on a GPU,
            others are backends of ``torch.compile``.
        generate_kwargs: further arguments of every ``generate``, such as ``do_sample`` and
            ``temperature``.

    Returns:
        The measurements. On ``KeyboardInterrupt`` these are the ones until then, and
        ``interrupted`` is set.

    Raises:
        ValueError: there are no prompts, or one cannot be read; or a strategy, its options or
            another argument does not work with the model.
    """
    for name in NOT_OF_ALL & generate_kwargs.keys():
        raise ValueError(
            f"{name}={generate_kwargs[name]!r}: benchmark() sets this itself, or measures calls "
            "without it. Leave it out; options of a strategy go into strategies={NAME: {...}}."
        )
    _check_arguments(model, tokenizer, generate_kwargs)
    check_count("seed", seed, 0)
    base: Any = model
    if isinstance(model, PeftModel) and not model.active_peft_config.is_prompt_learning:
        base = model.get_base_model()  # whose forwards are counted; the adapters stay active
    with_it: dict[str, Any] = {"assistant_model": assistant_model}
    if assistant_tokenizer is not None:
        with_it |= {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
    return run(
        base, tokenizer, read_prompts(prompts), _lineup(strategies, with_it),
        batch_sizes=list(batch_size) if isinstance(batch_size, Iterable) else [batch_size],
        max_new_tokens=max_new_tokens, limit=limit, seed=seed, compiled=backend,
        continuous=continuous, generate_kwargs=generate_kwargs,
    )  # fmt: skip


def _check_arguments(model: Any, tokenizer: Any, more: Mapping[str, Any]) -> None:
    """Raise a ValueError unless there are a model and a tokenizer, and further arguments are of
    ``generate``, as far as names tell."""
    kinds = f"model={type(model).__name__}, tokenizer={type(tokenizer).__name__}"
    if not hasattr(model, "generate"):
        swapped = " They are the wrong way round." if hasattr(tokenizer, "generate") else ""
        raise ValueError(f"{kinds}: give a model that is loaded, and its tokenizer.{swapped}")
    if not callable(tokenizer) or hasattr(tokenizer, "generate"):
        raise ValueError(f"{kinds}: give the model's tokenizer, AutoTokenizer.from_pretrained(...)")
    functions = model.generate, model.forward
    known = {name for one in functions for name in inspect.signature(one).parameters}
    own = [*inspect.signature(benchmark).parameters]
    for name in more.keys() - known - vars(GenerationConfig()).keys():
        for near in get_close_matches(name, own, 1, 0.8):
            raise ValueError(f"benchmark() has no argument {name!r} (did you mean {near!r}?)")


def read_prompts(prompts: Iterable[GivenPrompt]) -> list[Prompt]:
    """The prompts that are given; a ValueError says which one cannot be read."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r}: give a list of prompts, also if there is only one.")
    found = []
    for number, given in enumerate(prompts):
        if isinstance(given, Mapping):
            fields = dict(given)
        elif isinstance(given, str):
            fields = {"prompt": given}
        elif isinstance(given, Sequence):
            fields = {"messages": list(given)}
        else:
            raise ValueError(f"prompts[{number}]={given!r}: give a text, a chat or a row.")
        with explained(f"prompts[{number}]", ValueError):
            found.append(example(Row(f"prompts[{number}]", number, fields)))
    return found


def _lineup(
    strategies: str | Iterable[str] | Mapping[str, Mapping[str, Any]], with_it: dict[str, Any]
) -> list[Contender]:
    """The contenders by their names, and options where these are given; ``with_it``: arguments of
    calls with an assistant."""
    if not isinstance(strategies, Iterable):
        raise ValueError(f"strategies={strategies!r}: give names, or options by name.")
    options = strategies if isinstance(strategies, Mapping) else {}
    for name, own in options.items():
        if not isinstance(own, Mapping):
            raise ValueError(
                f"strategies: {name!r}: {own!r} must be a dict of options, such as {{}}."
            )
    names, assistant = parse_names(strategies), with_it["assistant_model"]
    drafts = [name for name in names if needs_assistant(name)]
    if drafts and assistant is None:
        raise ValueError(
            f"strategy {drafts[0]!r}: give the smaller model that drafts, assistant_model=..."
        )
    if assistant is not None and not drafts:
        raise ValueError(
            f"assistant_model={type(assistant).__name__}: no strategy here drafts with it. Leave "
            "it out, or name 'draft_model'."
        )
    return [
        contender_of(name, dict(options.get(name, {})), with_it if name in drafts else {})
        for name in names
    ]
