"""Turns draft trees and the model's logits into accepted tokens: logits processors on the true
prefix of each node, then the chosen rule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as stock

from hf_spec.core import verify
from hf_spec.core.device import Ragged, bucket, is_async, to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult, VerifyProgram
from hf_spec.decoding.sequences import Recorded, Sequences
from hf_spec.draft.options import DraftOptions
from hf_spec.target.noise import SamplingNoise
from hf_spec.threads import RUNNING, cached_property

# -- Logits processors on the true prefix of a tree node -------------------------------------------

#: Most token ids of a processor that recorded code may contain. Of some more, from 18 to 60 by the
#: size of the vocabulary, `torch.isin` sorts, for which the host waits.
MOST_IDS = 16

#: Processors that treat each row alone and never look at its tokens.
ROWWISE = (
    stock.EpsilonLogitsWarper, stock.EtaLogitsWarper, stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization, stock.MinPLogitsWarper, stock.SuppressTokensLogitsProcessor,
    stock.TemperatureLogitsWarper, stock.TopKLogitsWarper, stock.TopPLogitsWarper,
    stock.TypicalLogitsWarper,
)  # fmt: skip

#: Processors that look at which tokens a row has, from column ``prompt_ignore_length`` on, but not
#: at where or how often.
UNORDERED = (stock.RepetitionPenaltyLogitsProcessor,)

#: Processors that change rows of fewer columns than this, and look at nothing else.
SHORTER: dict[type, Callable[[Any], int]] = {
    stock.MinLengthLogitsProcessor: lambda one: one.min_length,
    stock.MinNewTokensLengthLogitsProcessor: lambda one: (
        one.prompt_length_to_skip + one.min_new_tokens
    ),
}

#: Processors whose result depends on the rows' tokens and logits alone, not on earlier calls.
STATELESS = (
    *ROWWISE, stock.EncoderNoRepeatNGramLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor, stock.ExponentialDecayLengthPenalty,
    stock.ForcedBOSTokenLogitsProcessor, stock.ForcedEOSTokenLogitsProcessor,
    stock.MinLengthLogitsProcessor, stock.MinNewTokensLengthLogitsProcessor,
    stock.NoBadWordsLogitsProcessor, stock.NoRepeatNGramLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor, stock.SequenceBiasLogitsProcessor,
    stock.SuppressTokensAtBeginLogitsProcessor, stock.TopHLogitsWarper,
    stock.WatermarkLogitsProcessor,
)  # fmt: skip


def is_stateless(processor: Any) -> bool:
    """Whether it is known that a processor's result does not depend on its earlier calls.

    Known are those of Transformers, and any that says so by an attribute ``stateless = True``.
    """
    return type(processor) in STATELESS or getattr(processor, "stateless", False) is True


class Scorer:
    """Applies a call's logits processors to draft tokens of rows of different lengths.

    A processor sees exactly what it sees in plain generation: the row's input ids, padding
    included, followed by the tokens up to the node, and float32 logits. It sees all sequences of
    the call in order, even after the batch has shrunk: those that have left keep their last logits,
    and finished ones are padded. Those at the end of the list that treat rows alone, such as the
    temperature, see only the rows whose scores are needed.

    A processor that may keep a state, such as a grammar matcher, must be called once for each
    column. The rows of a batch are then of equal length (``lockstep``).

    Args:
        processors: the prepared list.
        sequences: the call's sequences; prefixes of nodes are written into their scratch space.

    Attributes:
        trivial: whether scores are just the logits.
        rowwise: whether all processors treat each row alone and never look at its tokens.
        unordered: whether all treat each row alone, and look at its length and, one of them at
            most, at which tokens it has.
        stateful: names of the processors that may keep a state.
        lockstep: whether all rows must take equally many tokens in each step.
    """

    def __init__(self, processors: LogitsProcessorList, sequences: Sequences):
        self.sequences, self.processors = sequences, processors
        stateless = LogitsProcessorList([one for one in processors if is_stateless(one)])
        self.stateful = [type(one).__name__ for one in processors if not is_stateless(one)]
        self._all = _split(processors)
        self._drafting = _split(stateless) if self.stateful else self._all
        self.trivial, self.rowwise = not processors, not self._all[0]
        self._first = _first_seen(processors, len(sequences.lengths), sequences.prompt_length)
        self.unordered = self._first is not None
        self.lockstep = bool(self.stateful) and len(sequences.lengths) > 1
        #: The last logits of all sequences of the call.
        self._logits: Tensor | None = None
        self._error: Exception | None = None  # see :meth:`along`

    @cached_property
    def key(self) -> Hashable:
        """What scores at all nodes depend on besides logits and :meth:`context`; None if on more
        than that."""
        if not self.unordered:
            return None
        settings = [
            (type(one).__name__, *((name, _constant(value)) for name, value in vars(one).items()))
            for one in self._of_nodes
        ]
        known = all(value is not NotImplemented for _, *pairs in settings for _, value in pairs)
        return tuple(settings) if known else None

    def context(self) -> list[Tensor]:
        """What :meth:`everywhere` needs of the rows' tokens, see :meth:`Sequences.of_rows`; nothing
        if processors never look at them, or are not :attr:`unordered`."""
        if self.rowwise or self._first is None:
            return []
        return list(self.sequences.of_rows(self._first))

    @cached_property
    def _of_nodes(self) -> list[Any]:
        """The processors where they are shown what they look at, and nothing else."""
        processors = [copy.copy(one) for part in self._all for one in part]
        for one in processors:
            if type(one) in UNORDERED:
                one.prompt_ignore_length = None
        return processors

    def __call__(
        self, logits: Tensor, suffix: Tensor, active: Sequence[bool], drafting: bool = False
    ) -> Tensor:
        """Scores ``(batch, vocab)`` float32 after all processors, on the logits' device.

        Args:
            logits: ``(batch, vocab)`` of the rows of the batch; if all processors are rowwise, of
                any rows.
            suffix: ``(batch, n)`` tokens that follow each row before its processors run.
            active: rows to process; the others' scores are arbitrary.
            drafting: leave out processors that may keep a state: a draft's tokens are not yet the
                text that they follow. An error is one of the call only if the text goes on there.
        """
        if not drafting:
            return self._process(self._all, logits, suffix, active)
        with suppress(Exception):
            return self._process(self._drafting, logits, suffix, active)
        return logits.float()

    def _process(
        self, parts: tuple[LogitsProcessorList, LogitsProcessorList], logits: Tensor,
        suffix: Tensor, active: Sequence[bool],
    ) -> Tensor:  # fmt: skip
        """:meth:`__call__` with these processors, see :func:`_split`."""
        device, scores = logits.device, logits.float()
        whole_batch, rowwise = parts
        if not whole_batch and not rowwise:
            return scores
        scores = scores.to(self.sequences.ids.device)
        if whole_batch:
            scores = self._process_all(whole_batch, scores, suffix, active)
        if rowwise:
            rows = [row for row, on in enumerate(active) if on]
            if len(rows) == len(scores):
                scores = rowwise(self.sequences.ids, scores.clone())
            elif rows:
                index = to_device(rows, scores.device)
                processed = rowwise(self.sequences.ids, scores[index])
                scores = scores.index_copy(0, index, processed)
        return scores.to(device)

    def along(
        self, logits: Tensor, suffix: Tensor, active: Sequence[bool]
    ) -> tuple[Tensor, list[int]]:
        """Scores at the end of accepted paths, and the rows for which a processor has raised an
        error there. Behind draft tokens it is not yet one of the call, as plain generation may stop
        before: if it goes on, the next step raises it."""
        if self._error is not None:
            raise self._error
        try:
            return self(logits, suffix, active), []
        except Exception as error:
            if not suffix.shape[1]:
                raise
            if self.stateful:  # others are asked once more
                self._error = error
            return logits, [row for row, on in enumerate(active) if on]

    def everywhere(self, tree: Tree, logits: Tensor, context: Sequence[Tensor] = ()) -> Tensor:
        """Scores ``(batch, tokens, vocab)`` float32 at all nodes with a token.

        Args:
            context: :meth:`context` of the step.
        """
        nodes = logits.shape[1]
        if self.unordered:
            scores = logits.to(self.sequences.device, torch.float32, copy=True).flatten(0, 1)
            ids, span = context or (None, tree.tokens.new_zeros(2, len(logits)))
            columns = (span[1][:, None] + tree.depths[:, :nodes]).to(scores.device)
            columns = columns.flatten()[:, None]  # of each node's prefix
            ids = _prefixes(tree, nodes, ids, span).to(scores.device).flatten(0, 1)
            for processor in self._of_nodes:
                if (shorter := SHORTER.get(type(processor))) is None:
                    scores = processor(ids, scores)
                else:
                    changed = processor(ids[:, :0], scores)
                    scores = torch.where(columns < shorter(processor), changed, scores)
            return scores.unflatten(0, logits.shape[:2]).to(logits.device)
        tree, scores = tree.without_probes, logits.to(torch.float32, copy=True)
        for node, depths in enumerate(tree.depths.T.tolist()):
            # The nodes on the path to this one come first, by their depths.
            off_path = ~tree.ancestors[:, node]
            order = tree.depths.masked_fill(off_path, nodes).argsort(dim=1)
            for depth in set(depths):
                rows = [own == depth for own in depths]
                suffix = tree.tokens.gather(1, order[:, 1 : depth + 1])
                processed = self(logits[:, node].float(), suffix, rows)
                here = to_device(rows, scores.device)[:, None]
                scores[:, node] = torch.where(here, processed, scores[:, node])
        return scores

    def _process_all(
        self, processors: LogitsProcessorList, logits: Tensor, suffix: Tensor,
        active: Sequence[bool],
    ) -> Tensor:  # fmt: skip
        """:meth:`__call__` for processors that see the whole batch: once for each length."""
        sequences, size = self.sequences, suffix.shape[1]
        index, count = to_device(sequences.rows, logits.device), len(sequences.lengths)
        moved = list(sequences.rows) != list(range(count))  # some have left, or changed places
        if moved and (self._logits is not None or len(logits) == count):
            others = torch.empty_like(logits) if self._logits is None else self._logits
            logits = others.index_copy(0, index, logits)
        self._logits = scores = logits
        if size:
            sequences.write(suffix)
        groups: dict[int, list[int]] = {}
        for row, on in sorted(zip(sequences.rows, active)):  # in the call's order
            if on:
                groups.setdefault(sequences.lengths[row] + size, []).append(row)
        for place, (length, rows) in enumerate(groups.items()):
            # The whole batch, since processors may rely on its size and on a row's index; their
            # results for rows of another length are dropped. These may have another dtype or size
            # than logits.
            processed = processors(sequences.shown(length), logits.clone())
            if place:
                own = to_device([row in rows for row in range(len(scores))], scores.device)
                processed = torch.where(own[:, None], processed, scores)
            scores = processed
        return scores[index] if moved else scores


def _first_seen(processors: LogitsProcessorList, count: int, width: int) -> list[int] | None:
    """The first column of each of ``count`` sequences that processors look at, where one of them at
    most looks at any, and not at where tokens are; else None. ``width``: of the prompts."""
    looking = [one for one in processors if type(one) not in (*ROWWISE, *SHORTER)]
    if not looking:
        return [0] * count
    if len(looking) > 1 or type(looking[0]) not in UNORDERED:
        return None
    first = looking[0].prompt_ignore_length
    columns = [first or 0] * count if not isinstance(first, Tensor) else first.tolist()
    # What has been emitted is always seen.
    return columns if len(columns) == count and max(columns) <= width else None


def _constant(value: Any) -> Hashable:
    """A processor's attribute as a part of a key; ``NotImplemented`` if it is none."""
    if isinstance(value, Tensor) and value.dtype == torch.long and value.numel() <= MOST_IDS:
        return value.shape, *value.flatten().tolist()
    plain = isinstance(value, (bool, int, float, str, type(None)))
    return value if plain else NotImplemented


def _prefixes(tree: Tree, nodes: int, ids: Tensor | None, span: Tensor) -> Tensor:
    """``(batch, nodes, n)`` the tokens up to each node, in no order and some of them repeatedly, so
    that all have the same number; without the rows' tokens only those of the tree."""
    tokens = tree.tokens[:, :nodes]
    path = torch.where(tree.ancestors[:, :nodes, :nodes], tokens[:, None], tokens[:, :, None])
    if ids is None:
        return path
    columns, (first, end) = torch.arange(ids.shape[1], device=ids.device), span[:, :, None]
    known = torch.where((columns >= first) & (columns < end), ids, tokens[:, :1].to(ids))
    return torch.cat([known[:, None].expand(-1, nodes, -1), path.to(ids)], 2)


def _split(processors: LogitsProcessorList) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """Processors that see the whole batch, and those after them that treat rows alone."""
    places = [place for place, one in enumerate(processors, 1) if type(one) not in ROWWISE]
    last = max(places, default=0)
    return LogitsProcessorList(processors[:last]), LogitsProcessorList(processors[last:])


# -- Accepted tokens, by the chosen rule -----------------------------------------------------------


#: Greedy decoding by argmax.
GREEDY = VerifyProgram("greedy", verify.greedy)


class Acceptance:
    """Applies an acceptance rule under a call's logits processors.

    Args:
        config: the call's prepared configuration.
        options: the options that name the rule.
        scorer: the call's logits processors.
        seeds: of the random numbers of each sequence; None to draw them.

    Attributes:
        noise: what tokens are sampled with, for drafters to see; None if nothing is sampled, or if
            the output depends on the drafts.
        recorded: logits and scores ``(batch, vocab)`` that each token of the last step was chosen
            from, if the call's output contains them.

    Raises:
        ValueError: if the rule asks for scores of several continuations, and a processor keeps a
            state.
    """

    def __init__(
        self, config: GenerationConfig, options: DraftOptions, scorer: Scorer,
        seeds: Sequence[int] | None = None,
    ):  # fmt: skip
        if options.acceptance == "typical" and scorer.stateful:
            raise ValueError(
                f"acceptance='typical' with the logits processor {scorer.stateful[0]}: typical "
                "acceptance scores several continuations of a prefix, which a processor that keeps "
                "a state cannot. Choose acceptance='match'; or, if its result depends on its "
                "arguments alone, set its attribute stateless = True."
            )
        self.options, self.scorer = options, scorer
        self.do_sample = bool(config.do_sample)
        wanted = config.output_logits, config.output_scores
        #: Whether logits, and whether scores, are recorded for the call's output.
        self.wants = tuple(bool(config.return_dict_in_generate and one) for one in wanted)
        self.records = any(self.wants)
        self.recorded: list[Recorded] = []
        #: Number of logits, and their device, once they are known.
        self._drawn_for: tuple[int, torch.device]
        self.noise: SamplingNoise | None = None
        if self.do_sample and options.acceptance == "match":
            ids = scorer.sequences.ids
            self.noise = SamplingNoise(len(ids), ids.device, config.temperature or 1.0, seeds)

    def matches(self, tree: Tree) -> bool:
        """Whether the match rule applies to unprocessed logits: greedy decoding by argmax."""
        known = self.scorer.trivial and not self.do_sample and not self.records
        return known and tree.q is None and self.options.acceptance != "typical"

    def program(self, tree: Tree, recorded: bool = False, ahead: int = 0) -> VerifyProgram | None:
        """The rule as a function of tensors; None if there is none.

        Args:
            recorded: whether the host should read nothing: scores may then be computed at all nodes
                where those along the accepted path are needed.
            ahead: number of tokens after the step whose noise is wanted.
        """
        if self.matches(tree):
            return GREEDY
        noise, key = self.noise, self.scorer.key
        if not recorded or key is None or self.records or tree.q is not None:
            return None
        if self.options.acceptance == "typical":
            return self._typical_program(tree, key)
        if noise is None and self.do_sample:
            return None

        def accept(tree: Tree, logits: Tensor, inputs: Sequence[Tensor]) -> StepResult:
            return verify.match(tree, self.targets(tree, logits, inputs))

        key = "match", key, None if noise is None else tuple(noise.temperatures)
        later = None if noise is None else self.ahead
        return VerifyProgram(key, accept, self.inputs(bucket(tree.max_depth + 1 + ahead)), later)

    def inputs(self, width: int) -> list[Tensor]:
        """What :meth:`targets` needs besides the step's trees and logits: the noise of tokens at so
        many depths, if they are sampled, and what processors are to be shown."""
        drawn = [] if self.noise is None else [self.noise.drawn(width)]
        return drawn + self.scorer.context()

    def targets(self, tree: Tree, logits: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """The target's token after every node, ``(batch, tokens)``: the likeliest one, or the one
        that is sampled with the noise. ``inputs``: see :meth:`inputs`."""
        if self.noise is None and self.scorer.trivial:
            return verify.likeliest(logits)
        if self.noise is None:
            return verify.likeliest(self.scorer.everywhere(tree, logits, inputs))
        drawn, *context = inputs
        scores = self.scorer.everywhere(tree, logits, context)
        rows = torch.arange(len(logits), device=logits.device)
        chosen = drawn[rows[:, None], tree.depths[:, : logits.shape[1]]]
        return verify.sample(scores.softmax(-1), chosen)

    def ahead(self, inputs: Sequence[Tensor], result: StepResult, depth: int) -> Tensor:
        """What the tokens after a step's result will be sampled with; see :class:`VerifyProgram`.
        The first of ``inputs`` is what they are drawn with."""
        assert self.noise is not None
        drawn = inputs[0]
        rows, order = (torch.arange(n, device=drawn.device) for n in (len(drawn), depth))
        own = drawn[rows[:, None], result.counts[:, None] + order]
        return -self.noise.scaled(own.log())

    def _typical_program(self, tree: Tree, key: Hashable = None) -> VerifyProgram:
        """Typical acceptance, whose bonus token is sampled with numbers that are drawn before."""
        limits = self.options.typical_epsilon, self.options.typical_delta
        context = self.scorer.context()

        def accept(tree: Tree, logits: Tensor, inputs: Sequence[Tensor]) -> StepResult:
            shown, drawn = inputs[: len(context)], inputs[len(context) :]

            def select(scores: Tensor) -> Tensor:
                return verify.sample(scores.softmax(-1), *drawn) if drawn else scores.argmax(-1)

            active = tree.valid[:, 0]  # what finished rows get does not matter
            scores = self.scorer.everywhere(tree, logits, shown)
            return verify.typical(tree, scores, select, active, *limits)

        with RUNNING:
            drawn = [
                torch.empty(tree.batch_size, width, dtype=torch.float32, device=on).exponential_()
                for width, on in [self._drawn_for] * self.do_sample
            ]
        key = "typical", key, limits, self.do_sample
        return VerifyProgram(key, accept, [*context, *drawn])

    def __call__(
        self, tree: Tree, logits: Tensor, unfinished: list[bool], ragged: Ragged | None = None
    ) -> StepResult:
        """Choose the accepted path of every row that is unfinished, by logits of the model
        ``(batch, tokens, vocab)``, or without the padding of ``ragged`` nodes."""
        if self.matches(tree):
            likeliest = verify.likeliest(logits)
            return verify.match(tree, likeliest if ragged is None else ragged.pad(likeliest))
        stateful = bool(self.scorer.stateful)
        eos = self.scorer.sequences.eos
        if stateful and eos:
            # Plain generation calls no processor for a row that has ended. The end itself is still
            # emitted, as the token after its parent.
            tree = tree.without(list(eos))
        self.recorded = []
        self._drawn_for = logits.shape[-1], logits.device
        if self.noise is not None:
            self.noise.vocabulary = logits.shape[-1]
        # Of a root alone the rule says nothing; that of the prompt is no token of the text.
        if self.options.acceptance == "typical" and tree.num_tokens > 1:
            return self._typical(tree, logits if ragged is None else ragged.pad(logits))
        active = to_device(unfinished, logits.device)
        # A processor with a state must not be called for more tokens than are accepted.
        early_exit = stateful or not is_async(logits.device)
        rejects = tree.q is not None and not stateful
        # Where drafts are rejected at random, an error behind them is one of the call.
        process = self._raising if rejects else self.scorer.along
        score = self._along_path(tree.without_probes, logits, ragged, process)
        all_raised: list[int] = []

        def known(active: Tensor) -> list[bool]:
            """The rows that go on: all that are unfinished, if the host does not ask."""
            return active.tolist() if early_exit else unfinished

        def scores(nodes: Tensor, active: Tensor, depth: int) -> Tensor:
            return score(nodes, known(active))[0]

        def choose(nodes: Tensor, active: Tensor, depth: int) -> Tensor:
            rows = known(active)
            found, raised = score(nodes, rows)
            chosen = self._select(found, rows, depth)
            if raised:
                chosen = chosen.index_fill(0, to_device(raised, chosen.device), -1)
                all_raised.extend(raised)
            return chosen

        if rejects:
            return verify.rejection(tree, scores, active, early_exit)
        # Also for rejection: equivalent for a greedy target, and exact for sampled drafts.
        result = verify.match_along(tree, choose, active, early_exit, self.scorer.lockstep)
        return verify.without_last(tree, result) if all_raised else result

    def _select(self, scores: Tensor, rows: Sequence[bool] = (), depth: int = 0) -> Tensor:
        """The tokens ``(batch,)`` of these rows after ``depth`` accepted draft tokens."""
        if not self.do_sample:
            return scores.argmax(-1)
        if self.noise is None:
            return verify.sample(scores.softmax(-1))
        return self.noise.choose(scores, depth, [row for row, on in enumerate(rows) if on])

    def _raising(self, *given: Any) -> tuple[Tensor, list[int]]:
        return self.scorer(*given), []

    def _along_path(
        self, tree: Tree, logits: Tensor, ragged: Ragged | None,
        process: Callable[..., tuple[Tensor, list[int]]],
    ) -> Callable[[Tensor, Sequence[bool]], tuple[Tensor, list[int]]]:  # fmt: skip
        """``process``, like :meth:`Scorer.along`, as a function of one node ``(batch,)`` of each
        row, and of which rows go on, to be called along the accepted path, from the root."""
        batch = torch.arange(tree.batch_size, device=logits.device)
        suffix: Tensor | None = None

        def score(nodes: Tensor, rows: Sequence[bool]) -> tuple[Tensor, list[int]]:
            nonlocal suffix
            if suffix is None:
                suffix = tree.tokens[:, :0]
            else:
                suffix = torch.cat([suffix, tree.tokens.gather(1, nodes[:, None])], 1)
            # A float32 copy, as in plain generation: processors may modify it.
            found = logits[batch, nodes] if ragged is None else ragged.at(logits, nodes)
            scores = found.to(torch.float32, copy=True)
            raw = scores.clone() if self.wants[0] else None
            processed, raised = process(scores, suffix, rows)
            if self.records:
                self.recorded.append((raw, processed if self.wants[1] else None))
            return processed, raised

        return score

    def _typical(self, tree: Tree, logits: Tensor) -> StepResult:
        program = self._typical_program(tree)
        result = program.function(tree, logits, program.inputs)
        if self.records:
            scores = self.scorer.everywhere(tree, logits, self.scorer.context())
            rows = torch.arange(len(logits), device=logits.device)
            both = zip((logits, scores), self.wants)
            whole = [one.float() if wanted else None for one, wanted in both]
            self.recorded = [
                tuple(one if one is None else one[rows, nodes] for one in whole)
                for nodes in result.path.unbind(1)
            ]
        return result
