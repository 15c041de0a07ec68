"""Generates training data: a model's own answers to prompts, which it may write itself.

The prompts are divided into batches of similar length. The answers of a batch depend only on the
settings and its number, not on interruptions or the number of processes; an engine behind an
address (:mod:`hf_spec.tools.training.endpoint`) is sent each prompt by itself. Where all turns of
chats are answered, the first ones of all chats are before the second ones, whose prompts hold them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from jinja2 import TemplateError

from hf_spec.adapters.config import weights_digest
from hf_spec.core.checks import check_same_settings, first_line
from hf_spec.decoding.call import UNTRAINED, choose
from hf_spec.files import read_json, write_atomically, write_json, writing
from hf_spec.tools.bench.contenders import Contender, contender_of
from hf_spec.tools.bench.environment import environment_of
from hf_spec.tools.bench.prompts import (
    encode_prompts,
    read_prompts,
    room_for_prompts,
    spread,
    usable,
)
from hf_spec.tools.bench.runner import Session
from hf_spec.tools.data import ALL, Prompt, label, progress_bar, read, sha256
from hf_spec.tools.loading import chosen_device
from hf_spec.tools.training.dataset import ANSWERS, PROVENANCE

if TYPE_CHECKING:
    from accelerate import PartialState

logger = logging.getLogger(__name__)

#: Takes answers by the index of their prompts, the seconds since the last ones, and their forward
#: passes, None if these are not known.
Note = Callable[[dict[int, list[int]], float, int | None], None]
#: Settings that are arguments of ``generate``; None is the model's own number.
ARGUMENTS = ("do_sample", "max_new_tokens", "temperature", "top_k", "top_p")


class Answer(NamedTuple):
    """An answer's number of tokens, and its text."""

    length: int
    text: str

    @classmethod
    def of(cls, row: dict[str, Any]) -> Answer:
        return cls(len(row["answer_ids"]), row["answer"])


class AnswerFolder:
    """The output folder: answers are appended as JSON lines while they are made. The provenance is
    written before the first one; that of a finished folder has ``rows``."""

    def __init__(self, path: Path):
        self.path = path
        self.answers, self.provenance = path / ANSWERS, path / PROVENANCE

    @property
    def begun(self) -> bool:
        """Whether it is known how its answers are made."""
        return self.provenance.is_file()

    def check(self, settings: dict[str, Any]) -> bool:
        """Whether the folder is finished; a ValueError if it was generated with other settings (as
        JSON types; only these are compared)."""
        if self.begun:
            before = read_json(self.provenance)
            check_same_settings(f"{str(self.path)!r} holds answers made", before, settings)
            return "rows" in before
        if self.answers.exists():
            raise ValueError(
                f"{str(self.answers)!r} is not of hf-spec distill: give another --output"
            )
        return False

    def begin(self, provenance: dict[str, Any]) -> None:
        """Write how the answers are made, and drop a last line that was not written to its end."""
        write_json(self.provenance, provenance)
        with self.answers.open("ab+") as file:
            file.seek(0)
            whole = sum(len(line) for line in file if line.endswith(b"\n"))
            if whole < file.tell():
                logger.warning("%s: the last line was cut off and is made again", self.answers)
            file.truncate(whole)

    def made(self) -> dict[int, Answer]:
        """The answers, by the index of their prompts."""
        return {row["index"]: Answer.of(row) for row in read(self.answers, lambda row: row.fields)}

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append answers."""
        with writing(self.path), self.answers.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)


def read_sources(
    paths: Sequence[str | Path], limit: int | None = None
) -> tuple[list[Prompt], dict[str, str]]:
    """At most ``limit`` prompts, divided evenly among categories, in the order of the files; and
    the name of each file or dataset by its SHA-256. A ValueError names one that is invalid, or is
    given twice."""
    prompts: list[Prompt] = []
    names: dict[str, str] = {}
    for path in paths:
        prompts += [replace(prompt, source=label(path)) for prompt in read_prompts(path)]
        digest = sha256(path)
        if digest in names:
            raise ValueError(f"the prompts of {str(path)!r} are given twice: leave one of them out")
        names[digest] = label(path)
    return spread(prompts, limit), names


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of the prompts of each batch, grouped by their lengths in tokens, longest first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + size] for start in range(0, len(order), size)]


def seed_batch(seed: int, number: int) -> None:
    """Seed the sampling of a batch."""
    torch.manual_seed((seed * 1_000_003 + number) % 2**63)


def tokenizer_sha256(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary, special tokens and chat template."""
    facts = [
        sorted(tokenizer.get_vocab().items()),
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        getattr(tokenizer, "chat_template", None),
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def processes(device: str | None) -> PartialState:
    """The processes of ``accelerate launch`` or ``torchrun``; otherwise this process alone."""
    from accelerate import PartialState

    launched = int(os.environ.get("LOCAL_RANK", -1)) >= 0
    on_cpu = chosen_device(device).startswith("cpu")
    # The timeout is how long processes wait for each other.
    return PartialState(cpu=launched and on_cpu, timeout=timedelta(days=7))


def distill(
    engine: Engine, prompts: Sequence[Prompt], folder: AnswerFolder, settings: dict[str, Any],
    wait: Callable[[], Any],
) -> dict[str, Any]:  # fmt: skip
    """Have the prompts answered that the folder lacks, finish it, and return its provenance, of
    which ``measured`` is of this run. Every process calls this; the main process writes.

    Args:
        folder: locked by the main process.
        settings: the values of the command's options that determine the answers, as JSON types;
            of ``prompts`` the name of each file by its SHA-256, none where the model wrote them.
        wait: returns when every process has called it.
    """
    tokenizer = engine.tokenizer
    room = room_for_prompts(engine.model, tokenizer, settings["max_new_tokens"])
    chats = [
        one.turns() if settings["turns"] == ALL else [one]
        for one in usable(tokenizer, prompts, room)
    ]
    facts = _facts(engine, settings)
    folder.check(facts)
    wait()  # no process writes before all have looked
    with engine.ready(settings) as chosen:
        facts["chosen"] = chosen
        if engine.is_main:
            folder.begin(facts)
        wait()
        work = Work(engine, settings, folder)
        for number in range(max(map(len, chats))):
            work.answer_turn(chats, number)
        wait()
    total = sum(answer.length for answer in work.made.values())
    provenance = {
        **facts, **engine.origin(), "truncated_prompts": work.truncated,
        "processes": engine.processes, "rows": len(work.made), "answer_tokens": total,
        "mean_answer_tokens": total / len(work.made), "measured": work.measured,
    }  # fmt: skip
    if engine.is_main:
        write_json(folder.provenance, provenance)
    wait()
    return provenance


class Engine(Protocol):
    """What answers prompts: a model here, or one behind an address.

    Attributes:
        model: what has its ``config`` and ``generation_config``.
        processes: how many share the work.
        is_main: whether this process writes.
    """

    model: Any
    tokenizer: Any
    processes: int
    is_main: bool

    def weights(self) -> dict[str, Any]:
        """For the provenance: what tells the weights from others under the same name."""

    def origin(self) -> dict[str, Any]:
        """For the provenance: the model's commit, the environment, and what else is known."""

    def ready(self, settings: Mapping[str, Any]) -> AbstractContextManager[dict[str, Any]]:
        """Within the block it answers with these settings; gives the options with which it does."""

    def answer(
        self, token_ids: dict[int, list[int]], made: Mapping[int, Answer], note: Note
    ) -> None:
        """Answer those of these prompts that are not made, and note answers as they come."""


class Generating:
    """A model in this process, or one in each of several, which share batches of prompts.

    Args:
        model: in evaluation mode, on its device, with the adapter of ``contender`` loaded.
        name: of the model, as it was typed.
        contender: the strategy that answers; None for the one that fits the model.
    """

    def __init__(
        self, model: Any, tokenizer: Any, name: str, contender: Contender | None,
        state: PartialState,
    ):  # fmt: skip
        if contender is None:
            strategy = choose(model).strategy  # which fits the model, as auto finds it
            contender = contender_of(strategy, default_options(strategy))
        self.model, self.tokenizer, self._name = model, tokenizer, name
        self._contender, self._state, self._batches = contender, state, 0
        self.processes, self.is_main = state.num_processes, state.is_main_process

    def weights(self) -> dict[str, Any]:
        return {"model_fingerprint": weights_digest(self.model)}

    def origin(self) -> dict[str, Any]:
        environment = environment_of(self.model, self._name, None)
        for name in ("model", "prompts", "prompts_sha256", "argv"):  # known, or of this machine
            del environment[name]
        revision = getattr(self.model.config, "_commit_hash", None)
        return {"model_revision": revision, "environment": environment}

    @contextmanager
    def ready(self, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        given = {name: settings[name] for name in ARGUMENTS if settings[name] is not None}
        self._settings = settings
        with Session.open(self.model, self.tokenizer, given, [self._contender]) as session:
            self._session = session
            yield self._contender.kwargs

    def answer(
        self, token_ids: dict[int, list[int]], made: Mapping[int, Answer], note: Note
    ) -> None:
        from accelerate.utils import gather_object

        indices, lengths = [*token_ids], [len(ids) for ids in token_ids.values()]
        grouped = batches(lengths, self._settings["batch_size"])
        numbered = enumerate(([indices[place] for place in own] for own in grouped), self._batches)
        self._batches += len(grouped)
        work = [(number, batch) for number, batch in numbered if not made.keys() >= {*batch}]
        self._state.wait_for_everyone()
        for start in range(0, len(work), self.processes):
            own = work[start : start + self.processes][self._state.process_index :][:1]
            done = [self._answer_batch(number, batch, token_ids) for number, batch in own]
            for found in gather_object(done):
                note(*found)

    def _answer_batch(
        self, number: int, indices: list[int], token_ids: dict[int, list[int]]
    ) -> tuple[dict[int, list[int]], float, int]:
        """Answers by index, and the seconds and forward passes that they took."""
        seed_batch(self._settings["seed"], number)
        batch = [token_ids[index] for index in indices]
        seconds, answers, steps, _ = self._session.generate(self._contender, batch)
        return dict(zip(indices, answers)), seconds, steps


class Work:
    """What a run does: fills the folder with the answers that it lacks, turn by turn.

    Attributes:
        made: all answers, by the index of their prompts, in which the turns of a chat follow each
            other; the same in every process.
        truncated: number of prompts that were cut.
    """

    def __init__(self, engine: Engine, settings: dict[str, Any], folder: AnswerFolder):
        self.tokenizer, self.engine = engine.tokenizer, engine
        self.settings, self.folder = settings, folder
        self.made, self.truncated = folder.made(), 0
        self._tokens, self._seconds = 0, 0.0
        self._steps: int | None = 0

    @property
    def measured(self) -> dict[str, float | None]:
        """What was measured in this run; an engine does not say its tau."""
        steps = self._steps
        return {
            "answer_tokens": self._tokens, "seconds": self._seconds,
            "tokens_per_second": self._tokens / max(self._seconds, 1e-9),
            "tau": None if steps is None else self._tokens / max(steps, 1),
        }  # fmt: skip

    def answer_turn(self, chats: Sequence[Sequence[Prompt]], number: int) -> None:
        """Answer the turns of this number, from 0, with the model's own answers to those before."""
        prompts: dict[int, Prompt] = {}
        first = 0
        for turns in chats:
            if number < len(turns):
                own = {
                    len(turn.messages): self.made[first + place].text
                    for place, turn in enumerate(turns[:number])
                }
                prompts[first + number] = turns[number].after(own)
            first += len(turns)
        encoded, cut = encode_prompts(
            self.engine.model, self.tokenizer, list(prompts.values()),
            self.settings["max_new_tokens"],
        )  # fmt: skip
        self.truncated += cut
        token_ids = dict(zip(prompts, encoded))
        with progress_bar("answering", self.engine.is_main) as progress:

            def show() -> None:
                speed = self.engine.processes * self._tokens / max(self._seconds, 1e-9)
                done = len(prompts.keys() & self.made.keys())
                progress(done, len(prompts), note=f"{speed:,.0f} tokens/s" if speed else "")

            def note(found: dict[int, list[int]], seconds: float, steps: int | None) -> None:
                self._tokens += sum(map(len, found.values()))
                self._seconds += seconds
                self._steps = None if steps is None else (self._steps or 0) + steps
                rows = [
                    _row(self.tokenizer, index, prompts[index], token_ids[index], ids)
                    for index, ids in found.items()
                    if index not in self.made
                ]
                self.made |= {row["index"]: Answer.of(row) for row in rows}
                if self.engine.is_main:
                    self.folder.add(rows)
                show()

            show()
            self.engine.answer(token_ids, self.made, note)


def _row(
    tokenizer: Any, index: int, prompt: Prompt, prompt_ids: list[int], answer_ids: list[int]
) -> dict[str, Any]:
    """A line of the answers."""
    return {
        "prompt_ids": prompt_ids, "answer_ids": answer_ids, "prompt": prompt.full_text,
        "answer": tokenizer.decode(answer_ids, skip_special_tokens=True),
        "category": prompt.category, "source": prompt.source,
        "question_id": str(prompt.question_id), "index": index,
    }  # fmt: skip


def default_options(strategy: Any) -> dict[str, Any]:
    """Options of a strategy unless ``--strategy-kwargs`` sets them."""
    # Leaving out drafts that do not pay depends on step times, and would make sampled numbers and
    # ties depend on them, too. In a batch, a few draft tokens per sequence fill a step.
    few = {"num_draft_tokens": 4} if strategy in ("prompt_lookup", UNTRAINED) else {}
    return {"drafting": "always", **few}


def _facts(engine: Engine, settings: dict[str, Any]) -> dict[str, Any]:
    """All that the answers depend on, as JSON types."""
    defaults = engine.model.generation_config.to_diff_dict()
    defaults.pop("transformers_version", None)
    config = {key: defaults[key] for key in defaults if key[0] != "_"}
    facts = {
        **settings, **engine.weights(), "tokenizer_sha256": tokenizer_sha256(engine.tokenizer),
        "generation_config": config,
    }  # fmt: skip
    return json.loads(json.dumps(facts))


# -- Prompts that a model writes itself, for training data where there are none --------------------
#
# A chat model is given its chat template up to where a user's words begin, and writes them:
# questions like those that it was trained on (Xu et al., "Magpie: Alignment Data Synthesis from
# Scratch by Prompting Aligned LLMs with Nothing", 2024, section 2.1). A model without a chat
# template begins texts.

#: The prompts, in the output folder.
OWN_PROMPTS = "prompts.jsonl"
#: Most tokens of a question; longer ones, which do not end in time, are left out.
LONGEST = 80
#: How the words are sampled. The model's own settings may be greedy.
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 0}
#: Samples per prompt before it is given up: models may repeat themselves, or not end.
MOST_SAMPLES = 8
#: What stands for a user's words in a template.
_WORDS = "0123456789"


def write_own_prompts(
    model: Any, tokenizer: Any, path: Path, count: int, batch_size: int, seed: int
) -> None:
    """Let a model write prompts, all different, into a file of JSON lines, in one step; a
    ValueError if it does not write so many. ``batch_size`` is that of answers; of prompts, which
    are shorter, four times as many are generated together."""
    texts: dict[str, None] = {}
    before, end = _around_words(tokenizer)
    with progress_bar("writing prompts") as progress:
        for number in range(-(-MOST_SAMPLES * count // (4 * batch_size))):
            progress(min(len(texts), count), count)
            if len(texts) >= count:
                break
            seed_batch(seed, number)
            texts |= dict.fromkeys(_written(model, tokenizer, before, end, 4 * batch_size))
    if len(texts) < count:
        raise ValueError(
            f"this model wrote {len(texts)} different prompts in {MOST_SAMPLES * count} samples; "
            f"{count} were to be. Give some with --prompts, or lower --limit."
        )
    rows = [json.dumps({"prompt": text, "category": "own"}) for text in list(texts)[:count]]
    write_atomically(path, "\n".join(rows))


def _around_words(tokenizer: Any) -> tuple[list[int], str]:
    """Token ids before a user's words, and the text after them, empty without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        starts = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        start = next((one for one in starts if one is not None), None)
        if start is None:
            raise ValueError(
                "the tokenizer has neither a chat template nor a token that begins texts, so the "
                "model cannot write prompts: give some with --prompts."
            )
        return [start], ""
    chat = [{"role": "user", "content": _WORDS}]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, after = text.split(_WORDS)
    except (TemplateError, ValueError) as error:
        raise ValueError(
            "the tokenizer's chat template has no place for a user's words alone "
            f"({first_line(error)}): give prompts with --prompts."
        ) from error
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    return list(ids), after.strip()


@torch.no_grad()
def _written(model: Any, tokenizer: Any, before: list[int], end: str, batch: int) -> list[str]:
    """What the model writes in a batch, without what does not end."""
    first = tokenizer(end, add_special_tokens=False)["input_ids"][:1]
    token = tokenizer.decode(first)
    single = token in tokenizer.get_added_vocab()  # else a text of several tokens ends the words
    mark = token if single else end
    rows = torch.tensor([before] * batch, device=model.device)
    found = model.generate(
        rows, attention_mask=torch.ones_like(rows), **SAMPLING, num_beams=1,
        max_new_tokens=LONGEST if end else 24, assistant_strategy=None,
        **({"eos_token_id": first, "pad_token_id": first[0]} if single else {}),
    )[:, len(before) :]  # fmt: skip
    texts = []
    for written in tokenizer.batch_decode(found):
        words, ended, _ = written.partition(mark) if end else (written, True, "")
        marked = any(special in words for special in tokenizer.all_special_tokens)
        if ended and words.strip() and not marked:
            texts.append(words.strip())
    return texts
