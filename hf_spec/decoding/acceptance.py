"""Turns draft trees and the model's logits into accepted tokens, by the chosen rule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_spec.core import verify
from hf_spec.core.device import Ragged, bucket, is_async, to_device
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult, VerifyProgram
from hf_spec.decoding.scoring import Scorer
from hf_spec.draft.options import DraftOptions
from hf_spec.target.noise import SamplingNoise
from hf_spec.threads import RUNNING

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
        wants = config.output_scores or config.output_logits
        self.records = bool(config.return_dict_in_generate and wants)
        self.recorded: list[tuple[Tensor, Tensor]] = []
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
        # Of a root alone the rule says nothing; that of the prompt is no token of the text.
        if self.options.acceptance == "typical" and tree.num_tokens > 1:
            return self._typical(tree, logits if ragged is None else ragged.pad(logits))
        active = to_device(unfinished, logits.device)
        # A processor with a state must not be called for more tokens than are accepted.
        early_exit = stateful or not is_async(logits.device)
        score = self._along_path(tree.drafted, logits, ragged)

        def known(active: Tensor) -> list[bool]:
            """The rows that go on: all that are unfinished, if the host does not ask."""
            return active.tolist() if early_exit else unfinished

        def scores(nodes: Tensor, active: Tensor, depth: int) -> Tensor:
            return score(nodes, known(active))

        def choose(nodes: Tensor, active: Tensor, depth: int) -> Tensor:
            rows = known(active)
            return self._select(score(nodes, rows), rows, depth)

        if tree.q is not None and not stateful:
            return verify.rejection(tree, scores, active, early_exit)
        # Also for rejection: equivalent for a greedy target, and exact for sampled drafts.
        return verify.match_along(tree, choose, active, early_exit, self.scorer.lockstep)

    def _select(self, scores: Tensor, rows: Sequence[bool] = (), depth: int = 0) -> Tensor:
        """The tokens ``(batch,)`` of these rows after ``depth`` accepted draft tokens."""
        if not self.do_sample:
            return scores.argmax(-1)
        if self.noise is None:
            return verify.sample(scores.softmax(-1))
        return self.noise.choose(scores, depth, [row for row, on in enumerate(rows) if on])

    def _along_path(
        self, tree: Tree, logits: Tensor, ragged: Ragged | None
    ) -> Callable[[Tensor, Sequence[bool]], Tensor]:
        """A function that gives processed scores ``(batch, vocab)`` at one node ``(batch,)`` of
        each of some rows, to be called along the accepted path, from the root."""
        batch = torch.arange(tree.batch_size, device=logits.device)
        suffix: Tensor | None = None

        def score(nodes: Tensor, rows: Sequence[bool]) -> Tensor:
            nonlocal suffix
            if suffix is None:
                suffix = tree.tokens[:, :0]
            else:
                suffix = torch.cat([suffix, tree.tokens.gather(1, nodes[:, None])], 1)
            # A float32 copy, as in plain generation: processors may modify it.
            found = logits[batch, nodes] if ragged is None else ragged.at(logits, nodes)
            scores = found.to(torch.float32, copy=True)
            raw = scores.clone() if self.records else scores
            processed = self.scorer(scores, suffix, rows)
            if self.records:
                self.recorded.append((raw, processed))
            return processed

        return score

    def _typical(self, tree: Tree, logits: Tensor) -> StepResult:
        program = self._typical_program(tree)
        result = program.function(tree, logits, program.inputs)
        if self.records:
            scores = self.scorer.everywhere(tree, logits, self.scorer.context())
            rows = torch.arange(len(logits), device=logits.device)
            path = result.path.unbind(1)
            self.recorded = [(logits[rows, nodes].float(), scores[rows, nodes]) for nodes in path]
        return result
