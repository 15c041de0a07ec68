"""Random calls of ``generate``: does a strategy give the tokens of plain generation?

``python tests/random_cases.py --count 10000 --output cases.jsonl`` draws models with attention,
recurrent layers and images, strategies with their variants, batches with padding, processors, ends,
sampling, compiled steps, second turns, forms of prompts, criteria, streamers, options of all
strategies and modes of PyTorch.
Case number n is the same in every run; those that the output has are not run again. It prints what
differed and a summary. ``make random`` runs 1,000; ``make test`` runs a few.
"""

import argparse
import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import multimodal
import torch
from adapter_oracle import as_in_papers, lent
from conftest import ARCHITECTURES, EAGER_ONLY, EOS, VOCAB, padded, prompt, ragged, shared
from method_variants import VARIANTS, WIDE
from processors import Column, Matcher, Sooner, Streamed
from random_mtp import read_or_random
from recurrent_models import CONFIGS, shared_recurrent
from replay import RECORDED, Replay
from running import CAPTURED, default_dtype, needed
from torch import Tensor
from transformers import DynamicCache, MaxLengthCriteria, WatermarkingConfig

from hf_spec.methods import mtp
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.target import captures
from hf_spec.tools.bench.results import TIE_ULPS, next_token_logits, ulp

#: Kinds of models, and the models of each.
MODELS: dict[str, tuple[str, ...]] = {
    "attention": tuple(ARCHITECTURES),
    "recurrent": tuple(CONFIGS),
    "images": tuple(multimodal.KINDS),
}
#: What each method runs with: its variants, those that sample drafts included, and drafts that are
#: all accepted.
RUNS: dict[tuple[str, str], dict[str, Any]] = {
    (name, variant): options
    for name, run in VARIANTS.items()
    for variant, options in {**run.options, **run.sampled}.items()
} | {
    ("layer_skip", "whole"): {
        "skip_attention": [], "skip_mlp": [], "draft_exit": "fixed", "num_draft_tokens": 4,
    },
}  # fmt: skip
PROCESSORS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"encoder_repetition_penalty": 1.2},
    {"bad_words_ids": [[5], [6, 7], [9, 10, 11]]}, {"sequence_bias": {(5,): 3.0, (8, 9): -4.0}},
    {"begin_suppress_tokens": list(range(3, 30))}, {"min_new_tokens": 6},
    {"exponential_decay_length_penalty": (4, 1.3)},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
    {"forced_bos_token_id": 7, "forced_eos_token_id": EOS}, {"remove_invalid_values": True},
    {"suppress_tokens": [*range(3, 30)], "renormalize_logits": True},
    {"encoder_no_repeat_ngram_size": 2}, {"watermarking_config": WatermarkingConfig()},
    {"prefix_allowed_tokens_fn": lambda row, ids: [*range(3 + (row + len(ids)) % 3, VOCAB, 2)]},
)  # fmt: skip
WARPERS: tuple[dict[str, Any], ...] = (
    {"top_k": 0}, {"temperature": 0.7, "top_k": 7}, {"top_k": 0, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 20, "min_p": 0.02},
    {"top_k": 0, "typical_p": 0.7, "renormalize_logits": True}, {"top_k": 0, "top_h": 0.5},
    {"top_k": 0, "epsilon_cutoff": 0.01}, {"top_k": 0, "eta_cutoff": 0.01, "temperature": 2.0},
)  # fmt: skip
#: What a user's program may have set.
AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext, "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16), "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
}  # fmt: skip
#: Criteria of the user's own for prompts of a width, new ones for each call.
CRITERIA: dict[str, Callable[[int], list[Any]]] = {
    "": lambda width: [],
    "lengths": lambda width: [MaxLengthCriteria(width + 9), MaxLengthCriteria(width + 6)],
    "passed": lambda width: [MaxLengthCriteria(width - 1)],
    "subclass": lambda width: [MaxLengthCriteria(width + 20), Sooner(width + 12)],
    "column": lambda width: [Column()],
}
#: How prompts are given: what changes of ids, mask and the function that embeds them.
FORMS: dict[str, Callable[[Tensor, Tensor, Any], dict[str, Any]]] = {
    "": lambda ids, mask, embed: {},
    "int32": lambda ids, mask, embed: {"input_ids": ids.int(), "attention_mask": mask.int()},
    "bools": lambda ids, mask, embed: {"attention_mask": mask.bool()},
    "floats": lambda ids, mask, embed: {"attention_mask": mask.float()},
    "no mask": lambda ids, mask, embed: {"attention_mask": None},
    "positions": lambda ids, mask, embed: {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)},
    "embedded": lambda ids, mask, embed: {"input_ids": None, "inputs_embeds": embed(ids)},
    "embedded, too": lambda ids, mask, embed: {"inputs_embeds": embed(ids)},
}


class Case(NamedTuple):
    """A call of ``generate``, perhaps with a second turn.

    Attributes:
        seed: what it is drawn from.
        kind: of the model, see :data:`MODELS`.
        name, variant: the strategy and what it runs with, see :mod:`method_variants`.
        rows: of each row, images and tokens besides.
        matched: whether a processor keeps a state per row.
        compiled: whether steps are compiled.
        recorded: whether those are recorded instead, and replayed.
        turn: cache of a second turn: a ``"tree"`` or a ``"dynamic"`` one; None for one turn.
        removed: tokens of the first answer that the second turn leaves out.
        around, criteria, form: see :data:`AROUND`, :data:`CRITERIA` and :data:`FORMS`.
        watched: whether what is streamed, and scores, are compared, too.
        more: options beside those of the variant.
    """

    number: int
    seed: int
    kind: str
    model: str
    attention: str
    name: str
    variant: str
    drafting: str
    rows: list[tuple[int, int]]
    settings: dict[str, Any]
    matched: bool = False
    compiled: bool = False
    recorded: bool = False
    turn: str | None = None
    removed: int = 0
    around: str = ""
    criteria: str = ""
    form: str = ""
    watched: bool = False
    more: dict[str, Any] = {}


def pairs(kinds: Iterable[str] = MODELS) -> Iterator[Case]:
    """Each model of these kinds with each strategy, in one drawn call for each model."""
    number = 0
    for kind, model in [(one, model) for one in kinds for model in MODELS[one]]:
        call = draw(number, [kind])._replace(
            model=model, attention="eager" if model in EAGER_ONLY else "sdpa", matched=False,
            settings={"max_new_tokens": 36, "do_sample": False}, drafting="always", turn=None,
            around="", criteria="", form="", watched=False, more={},
        )  # fmt: skip
        for name in methods():
            variants = [variant for owner, variant in RUNS if owner == name]
            variant = random.Random(number).choice(variants)
            yield call._replace(number=number, name=name, variant=variant)
            number += 1


def draw(number: int, kinds: Iterable[str] = MODELS) -> Case:
    """The case of a number among these kinds of models."""
    rng = random.Random(number)
    kind = rng.choice([*kinds])
    model = rng.choice(MODELS[kind])
    eager = kind == "attention" and (model in EAGER_ONLY or rng.random() < 0.4)
    name = rng.choice([*methods()])
    variant = rng.choice([variant for owner, variant in RUNS if owner == name])
    size = rng.choice((1, 1, 2, 3, 4))
    images = kind == "images"
    rows = [(rng.randint(1, 2) * images, rng.randint(1 + 3 * images, 16)) for _ in range(size)]
    settings: dict[str, Any] = {"max_new_tokens": rng.randint(1, 36), "do_sample": False}
    matched = rng.random() < 0.08
    if not matched and rng.random() < 0.5:
        settings |= rng.choice(PROCESSORS)
    # The match rule draws as plain generation does in one row; others only keep the distribution.
    if size == 1 and rng.random() < 0.35 and (name, variant) in matching():
        settings |= {"do_sample": True, **rng.choice(WARPERS)}
    if rng.random() < 0.4 or "exponential_decay_length_penalty" in settings:
        settings["eos_token_id"] = sorted(rng.sample(range(EOS, VOCAB - 3), rng.randint(1, 8)))
    turn = rng.choice(("tree", "tree", "dynamic")) if rng.random() < 0.3 else None
    if turn == "dynamic" and size > 1:
        turn = "tree"
    if not images and turn is None and rng.random() < 0.06:
        settings["prefill_chunk_size"] = rng.randint(2, 6)
    # Recurrent layers may give other logits where the parts of a row begin elsewhere.
    moved = kind == "recurrent" and "prefill_chunk_size" in settings
    waits = size > 1 and turn is None and not moved
    return Case(
        number, number, kind, model, "eager" if eager else "sdpa", name, variant,
        rng.choice(("always",) * 9 + ("auto",)), rows, settings, matched,
        compiled=rng.random() < 0.06, recorded=rng.random() < 0.6, turn=turn,
        removed=rng.choice((0, 0, 1, 3)) if turn == "tree" else 0,
        around=rng.choice([*AROUND]) if rng.random() < 0.4 else "",
        criteria=rng.choice([*CRITERIA]) if rng.random() < 0.2 else "",
        form="" if images or rng.random() < 0.7 else rng.choice([*FORMS][: -2 if turn else None]),
        watched=rng.random() < 0.15, more=options(rng, name, variant, waits),
    )  # fmt: skip


def options(rng: random.Random, name: str, variant: str, waits: bool) -> dict[str, Any]:
    """Options of all strategies, drawn after all else; ``waits``: whether rows may."""
    given, found = RUNS[name, variant], {}
    grows = name != "layer_skip" and given.get("acceptance") != "rejection" and "tree" not in given
    if rng.random() < 0.3:
        found["recycle"] = grows and rng.random() < 0.7
    if waits and rng.random() < 0.3:
        found["max_rows"] = rng.randint(1, 3)
    if rng.random() < 0.1:
        found["forced"] = False
    return {one: value for one, value in found.items() if one in methods()[name].option_names}


@cache
def matching() -> set[tuple[str, str]]:
    return {
        (name, variant)
        for (name, variant), options in RUNS.items()
        if methods()[name].parse_options(options).acceptance == "match"
    }


def model_of(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """The case's model, shared by all cases."""
    return _model(case.kind, case.model, case.attention, dtype)


@cache
def _model(kind: str, name: str, attention: str, dtype: torch.dtype) -> Any:
    if kind == "attention":
        return shared(name, attention, dtype)
    model = shared_recurrent(name) if kind == "recurrent" else multimodal.build(name)
    return model if model.dtype == dtype else copy.deepcopy(model).to(dtype)


class Outcome(NamedTuple):
    """What came of a case.

    Attributes:
        result: ``exact``; ``tie``, see :mod:`hf_spec.tools.bench.results`; ``rounding``, as plain
            generation's own distance from float32 is larger than that of the scores of both
            tokens; ``different``; ``refused``; ``raised``; ``invalid`` where plain generation
            raises.
        note: the error, or where the first difference is.
        tokens: that plain generation made.
        drafted: tokens that were drafted in place of them, in all turns.
        accepted: of these, those that were accepted.
        differences: rows that differ.
    """

    result: str
    note: str = ""
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    differences: int = 0


def run(case: Case, dtype: torch.dtype = torch.float32) -> Outcome:
    """Run a case with its strategy and without."""
    model = model_of(case, dtype)
    try:
        turns = _remembered(case, model)
    except Exception as error:
        return Outcome("invalid", f"{type(error).__name__}: {error}")
    try:
        with ExitStack() as stack:
            if methods()[case.name].needs_adapter:
                config = adapter_of(case.kind, case.name, case.variant)
                fields = VARIANTS[case.name].adapters.get(case.variant)
                stack.enter_context(lent(model, config, random=bool(fields)))
            found, drafted, accepted = _strategy(case, model, turns)
    except ValueError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("raised", f"{type(error).__name__}: {error}")
    tokens = sum(turn.new for turn in turns)
    for index, (turn, ours) in enumerate(zip(turns, found)):
        wrong = [row for row, pair in enumerate(zip(ours, turn.answers)) if pair[0] != pair[1]]
        if not wrong:
            continue
        row = wrong[0]
        pairs = enumerate(zip(ours[row], turn.answers[row]))
        first = next((place for place, (one, other) in pairs if one != other), None)
        note = f"turn {index}, row {row}, token {first}"
        kinds = [_difference(case, turn, row, ours[row], dtype) for row in wrong]
        result = max(kinds, key=("tie", "rounding", "different").index)
        return Outcome(result, note, tokens, drafted, accepted, len(wrong))
    return Outcome("exact", "", tokens, drafted, accepted)


def adapter_of(kind: str, name: str, variant: str) -> Any:
    """The config of the adapter with which a method runs a variant on a kind of models."""
    config: Any = methods()[name].adapter_config
    fields = dict(VARIANTS[name].adapters.get(variant) or {})
    if RUNS[name, variant] == WIDE:  # predicts each token of the tree
        fields |= as_in_papers(config)
    if name == "bita" and kind != "attention":
        fields["prompt_depth"] = "none"  # not every layer has keys and values
    return config(**fields)


class Turn(NamedTuple):
    """A prompt, and what plain generation adds.

    Attributes:
        inputs: of plain generation.
        prompts: tokens of each row.
        answers: the new tokens of each row; ``new`` are those of all rows.
        scores, logits: of each new token, ``(batch, vocab)`` what it was chosen from, and that
            before processors.
        streamed: what the streamer got.
    """

    inputs: dict[str, Any]
    prompts: list[list[int]]
    answers: list[list[int]]
    new: int
    scores: tuple[Tensor, ...]
    logits: tuple[Tensor, ...]
    streamed: Any = None


_last: dict[str, list[Turn]] = {}


def _remembered(case: Case, model: Any) -> list[Turn]:
    """What plain generation makes of a call; of the last one without running it again."""
    call = str((case._replace(number=0, name="", variant="", drafting="", more={}), model.dtype))
    if call not in _last:
        turns = _plain(case, model)
        _last.clear()
        _last[call] = turns
    return _last[call]


def _plain(case: Case, model: Any) -> list[Turn]:
    if case.kind == "images":
        inputs = multimodal.prompts(case.model, case.rows, dtype=model.dtype)
    else:
        inputs = ragged(tuple(length for _, length in case.rows), case.seed)
    own = {CACHE: dynamic(model)} if case.turn == "dynamic" else {}
    turns = [_answered(case, model, inputs, own)]
    if case.turn is not None:
        first = turns[0]
        rows = [
            tokens
            + answer[: max(len(answer) - case.removed, 0)]
            + prompt(3 + row, seed=case.seed + 50)[0].tolist()
            for row, (tokens, answer) in enumerate(zip(first.prompts, first.answers))
        ]
        if case.turn == "dynamic":
            more = prompt(4, len(rows), seed=case.seed + 50)
            ids = torch.cat([inputs["input_ids"], torch.tensor(first.answers), more], 1)
            mask = torch.ones_like(ids)
            mask[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"]
            following = {"input_ids": ids, "attention_mask": mask}
        else:
            following = padded(rows)
        if case.kind == "images":
            following |= multimodal.token_types(model, following["input_ids"])
            if case.turn == "tree":
                following = {**inputs, **following}
        turns.append(_answered(case, model, following, own))
    return turns


def dynamic(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _generate(case: Case, model: Any, inputs: dict[str, Any], **more: Any) -> Any:
    if case.matched:
        more["logits_processor"] = [Matcher()]
    if case.watched:
        more |= {"streamer": Streamed(), "output_scores": True, "output_logits": True}
    ids, embed = inputs["input_ids"], model.get_input_embeddings()
    more["stopping_criteria"] = CRITERIA[case.criteria](ids.shape[1])
    given = {**inputs, **FORMS[case.form](ids, inputs["attention_mask"], embed)}
    torch.manual_seed(case.seed)
    with AROUND[case.around]():
        out = model.generate(**given, **case.settings, **more, return_dict_in_generate=True)
    if given["input_ids"] is None:  # then it returns new tokens alone
        out.sequences = torch.cat([ids, out.sequences], 1)
    return out, more.get("streamer")


def _answered(case: Case, model: Any, inputs: dict[str, Any], own: dict[str, Any]) -> Turn:
    width = inputs["input_ids"].shape[1]
    more = {**own, "output_scores": True, "output_logits": True}
    out, streamed = _generate(case, model, inputs, **more)
    answers = [_ended(case, row) for row in out.sequences[:, width:].tolist()]
    real = inputs["attention_mask"].bool()
    prompts = [ids[keep].tolist() for ids, keep in zip(inputs["input_ids"], real)]
    new = sum(map(len, answers))
    return Turn(inputs, prompts, answers, new, out.scores, out.logits, streamed)


def _ended(case: Case, answer: list[int]) -> list[int]:
    """An answer without padding behind its end."""
    ends = case.settings.get("eos_token_id", [])
    stop = next((place for place, token in enumerate(answer) if token in ends), len(answer))
    return answer[: stop + 1]


def _strategy(
    case: Case, model: Any, turns: list[Turn]
) -> tuple[list[list[list[int]]], int, int]:  # fmt: skip
    """What the strategy adds in each turn; how many tokens were drafted and accepted."""
    options = {**RUNS[case.name, case.variant], "drafting": case.drafting, **case.more}
    spec: dict[str, Any] = {
        "assistant_strategy": case.name, "assistant_kwargs": options, **needed(case.name)
    }  # fmt: skip
    if case.compiled and case.turn != "dynamic":
        spec |= RECORDED if case.recorded else CAPTURED
    own = {CACHE: dynamic(model)} if case.turn == "dynamic" else {}
    found, drafted, accepted = [], 0, 0
    for index, turn in enumerate(turns):
        inputs = turn.inputs
        if index and case.turn == "tree":  # which has seen the images
            known = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
            inputs = {name: value for name, value in inputs.items() if name in known}
            spec = {name: value for name, value in spec.items() if name not in CAPTURED}
        out, streamed = _generate(case, model, inputs, **spec, **own)
        answers = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        found.append([_ended(case, row) for row in answers])
        if case.watched and found[-1] == turn.answers:
            check_watched(turn, out, streamed)
        drafted += out.spec_stats.num_drafted_tokens
        accepted += out.spec_stats.num_generated_tokens - out.spec_stats.num_row_steps
        if case.turn == "tree":
            own = {CACHE: out[CACHE]}
    return found, drafted, accepted


def check_watched(turn: Turn, out: Any, streamed: Any) -> None:
    """What was streamed, and the scores of each row up to its end, are plain generation's."""
    assert streamed == turn.streamed, "streamed otherwise"
    for ours, plain in ((out.scores, turn.scores), (out.logits, turn.logits)):
        assert len(ours) == len(plain), f"scores of {len(ours)} tokens, not {len(plain)}"
        for place, (one, other) in enumerate(zip(ours, plain)):
            # Past an end there is padding, and criteria end rows, too.
            rows = [row for row, own in enumerate(turn.answers) if any(own[place:])]
            torch.testing.assert_close(one[rows], other[rows], rtol=1e-3, atol=1e-2)


def _difference(case: Case, turn: Turn, row: int, ours: list[int], dtype: torch.dtype) -> str:
    """What a row's first difference is; see :class:`Outcome`."""
    pairs = enumerate(zip(ours, turn.answers[row]))
    place = next((place for place, (one, other) in pairs if one != other), None)
    if place is None or case.settings["do_sample"]:  # one of them ends before the other
        return "different"
    both = [ours[place], turn.answers[row][place]]
    scores, logits = turn.scores[place][row], turn.logits[place][row]
    apart = float(scores.max() - scores[both].min())
    # Processors compute in float32 from what was rounded.
    if apart <= TIE_ULPS * ulp(float(torch.cat([scores[both], logits[both]]).abs().max()), dtype):
        return "tie"
    if dtype == torch.float32 or case.kind == "images":
        return "different"
    prefix = torch.tensor([turn.prompts[row] + turn.answers[row][:place]])
    exact = next_token_logits(_precise(case.kind, case.model, case.attention, dtype), prefix)
    rounding = float((logits - exact)[both].diff().abs())
    return "rounding" if rounding >= apart else "different"


@cache
def _precise(kind: str, name: str, attention: str, dtype: torch.dtype) -> Any:
    return copy.deepcopy(_model(kind, name, attention, dtype)).float()


# -- as a program --------------------------------------------------------------------------------


def read(output: Path | None, key: str) -> dict[int, dict[str, Any]]:
    """The lines of a file by their numbers."""
    text = output.read_text() if output is not None and output.exists() else ""
    return {line[key]: line for line in map(json.loads, text.splitlines())}


def append(output: Path | None, line: dict[str, Any]) -> None:
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=1000, help="how many cases")
    parser.add_argument("--pairs", action="store_true", help="each model with each strategy")
    parser.add_argument("--kinds", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new", type=int, help="so many tokens, in one turn of at most two rows")
    parser.add_argument("--output", type=Path, help="a line per case; goes on where it stops")
    parser.add_argument("--recorded", action="store_true", help="recorded steps in all cases")
    parser.add_argument("--sequences", type=int, help="so many sequences of calls instead")
    given = parser.parse_args(arguments)
    if given.sequences is not None:
        import random_sequences  # which imports this module

        if given.output is not None:
            parser.error("--output: sequences have none; the first that fails is printed")
        print(dict(random_sequences.play(given.sequences, given.first)))
        return 0
    known = read(given.output, "number")
    numbers = range(given.first, given.first + given.count)
    cases = pairs(given.kinds) if given.pairs else (draw(one, given.kinds) for one in numbers)
    for case in cases:
        number = case.number
        if number in known:
            continue
        if given.dtype != "float32" and case.settings["do_sample"]:
            continue  # a difference in the last place moves every draw after it
        if given.new is not None:
            settings = {**case.settings, "max_new_tokens": given.new}
            case = case._replace(settings=settings, turn=None, rows=case.rows[:2])
        if given.recorded:
            case = case._replace(compiled=True, recorded=True)
        outcome = run(case, getattr(torch, given.dtype))
        known[number] = {**case._asdict(), **outcome._asdict()}
        known[number]["settings"] = str(case.settings)
        if outcome.result in ("different", "raised"):
            print(f"{outcome.result}: {outcome.note}: {case}", flush=True)
        append(given.output, known[number])
    results = Counter(line["result"] for line in known.values())
    tokens, drafted, accepted = (
        sum(line[name] for line in known.values()) for name in ("tokens", "drafted", "accepted")
    )
    print(f"{dict(results)}; {tokens} tokens, {drafted} drafted, {accepted} accepted")
    for kind in given.kinds:
        own = Counter(line["result"] for line in known.values() if line["kind"] == kind)
        print(f"  {kind}: {dict(own)}")
    return int(bool(results["different"] or results["raised"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    captures.RECORDERS["cpu"] = Replay
    mtp._read = read_or_random(mtp._read)  # no checkpoint of these has such layers
    raise SystemExit(main())
