"""Rollouts of reinforcement learning, drafted by the answers to the same prompts an epoch before.

A policy moves little in an epoch, so most of an answer would be sampled again with the same random
numbers. An answer is kept with the seed of its numbers; the next rollout draws them again and
verifies the old tokens by ``match``, in as few forwards as hold them. SPEC-RL (Liu et al., 2025,
arXiv 2509.23232) also verifies old answers, by probabilities: it accepts more tokens, but samples
from the new policy after a rejection, where the exact distribution (that of the residual) needs all
old probabilities there. With shared numbers each token depends on the new policy and its numbers
alone, so that the distribution is that of plain sampling.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from hf_spec.core.checks import check_count, check_range
from hf_spec.core.host_tree import Row
from hf_spec.core.limits import MAX_HISTORY
from hf_spec.core.memory import locked
from hf_spec.drafting.made_once import is_plain
from hf_spec.drafting.state import DecodeState
from hf_spec.files import replacing
from modeling_patches.weights_version import weights_version

#: Tokens of a forward, of each row, which are all as wide as the widest, and of the batch: logits
#: and random numbers of the whole vocabulary are held for each.
OF_A_ROW, OF_A_BATCH = 16, 512
#: Least share of the unfinished rows that have old tokens to verify. The others are padded, and
#: will take as many steps as these rows would.
SHARE = 3 / 4
#: Answers of a lenience above are as good as copied.
MAX_LENIENCE = 1000.0


@dataclass(eq=False)
class _Answer:
    """An answer: its tokens, its seed, and the number of times that weights had changed before."""

    tokens: array[int]
    seed: int
    round: int = -1


class RolloutHistory:
    """Answers of earlier rollouts, which draft later ones to the same prompts: the option
    ``history`` of any strategy, ``assistant_kwargs={"history": history}``.

    An answer is used once, when trained weights have changed since; of several answers to a prompt
    each drafts another one. Rollouts that sample draw the numbers of the answer that drafts them
    again. So rollouts of a prompt in different epochs are correlated, as far as the policy stays
    the same.

    Args:
        max_tokens: tokens of answers that are kept, of 4 bytes each; those of the prompts that were
            not seen for longest are dropped.
        fresh: share of rollouts that draw new numbers, against this correlation.
        lenience: how many times as likely a token of the earlier answer is made where it is
            verified, in rollouts that sample. Above 1 more of it is kept, but the answer is not
            sampled from the current policy: **lossy** (the idea is SPEC-RL's).
    """

    def __init__(
        self, max_tokens: int = MAX_HISTORY, fresh: float = 0.0, lenience: float = 1.0
    ):  # fmt: skip
        check_count("max_tokens", max_tokens)
        check_range("fresh", fresh, 0.0, 1.0)
        check_range("lenience", lenience, 1.0, MAX_LENIENCE)
        self.max_tokens, self.fresh, self.lenience = max_tokens, fresh, lenience
        #: Answers by prompt, the prompt that was seen last at the end.
        self._answers: OrderedDict[str, list[_Answer]] = OrderedDict()
        self._size = self._round = 0
        self._weights: Hashable = None

    def __repr__(self) -> str:
        return (
            f"RolloutHistory(max_tokens={self.max_tokens}, fresh={self.fresh}, "
            f"lenience={self.lenience})"
        )

    def __deepcopy__(self, memo: Any) -> RolloutHistory:
        return self  # generate() copies its configuration

    @locked
    def begin(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device
    ) -> Earlier:
        """The earlier answers for a call with these prompts, whose random numbers are drawn on a
        device."""
        trained = (x for x in model.parameters() if x.requires_grad)
        weights = weights_version([x for x in trained if is_plain(x)])
        self._round += weights != self._weights
        self._weights = weights
        keys = [blake2b(array("i", prompt), digest_size=16).hexdigest() for prompt in prompts]
        seeds = torch.randint(2**48, (len(keys),), device=device).tolist()
        fresh = (torch.rand(len(keys), device=device) < self.fresh).tolist()
        left = {
            key: [one for one in self._answers.get(key, ()) if one.round < self._round]
            for key in keys
        }
        old = [left[key].pop(0) if left[key] else None for key in keys]
        drafts = [
            _Answer(array("i"), seed) if one is None or new else one
            for one, seed, new in zip(old, seeds, fresh)
        ]
        return Earlier(self, keys, old, drafts, list(map(len, prompts)))

    @locked
    def add(self, earlier: Earlier, answers: Sequence[Sequence[int]]) -> None:
        """Keep the answers of a call, in place of those that drafted them."""
        for key, old, draft, answer in zip(earlier.keys, earlier.old, earlier.drafts, answers):
            known = self._answers.setdefault(key, [])
            if old in known:
                known.remove(old)
                self._size -= len(old.tokens)
            known.append(_Answer(array("i", answer), draft.seed, self._round))
            self._size += len(answer)
            self._answers.move_to_end(key)
        while self._size > self.max_tokens:
            _, dropped = self._answers.popitem(last=False)
            self._size -= sum(len(one.tokens) for one in dropped)

    @locked
    def save(self, path: str | Path) -> None:
        """Write the answers to a safetensors file, in one step; :meth:`load` takes them."""
        every = [(key, one) for key, some in self._answers.items() for one in some]
        tensors = {
            "prompts": torch.tensor([[*bytes.fromhex(key)] for key, _ in every], dtype=torch.uint8),
            "seeds": torch.tensor([one.seed for _, one in every], dtype=torch.int64),
            "lengths": torch.tensor([len(one.tokens) for _, one in every], dtype=torch.int64),
            "tokens": torch.tensor([x for _, one in every for x in one.tokens], dtype=torch.int32),
        }
        with replacing(Path(path)) as temporary:
            save_file(tensors, temporary)

    @locked
    def load(self, path: str | Path) -> None:
        """Take the answers of a file in place of those that are there.

        Raises:
            ValueError: if it is no file that :meth:`save` has written.
        """
        try:
            state = load_file(path)
            prompts, seeds, lengths = (state[x].tolist() for x in ("prompts", "seeds", "lengths"))
            parts = [part.tolist() for part in state["tokens"].split(lengths)] if lengths else []
        except (OSError, SafetensorError, LookupError, RuntimeError) as error:
            raise ValueError(
                f"{str(path)!r} holds no answers as RolloutHistory.save() writes them: {error!r}"
            ) from error
        self._answers.clear()
        for prompt, seed, tokens in zip(prompts, seeds, parts):
            answer = _Answer(array("i", tokens), seed)
            self._answers.setdefault(bytes(prompt).hex(), []).append(answer)
        self._size = sum(lengths)


@dataclass
class Earlier:
    """The earlier answers that draft a call.

    Attributes:
        history: where they are kept.
        keys: of each sequence's prompt.
        old: the answer that each sequence replaces; None if it replaces none.
        drafts: what drafts each sequence; it has no tokens if nothing does.
        prompts: number of tokens of each prompt.
    """

    history: RolloutHistory
    keys: list[str]
    old: list[_Answer | None]
    drafts: list[_Answer]
    prompts: list[int]

    @property
    def seeds(self) -> list[int]:
        """Of each sequence's random numbers."""
        return [one.seed for one in self.drafts]

    def __post_init__(self) -> None:
        self._left: list[Sequence[int]] = [one.tokens for one in self.drafts]

    def rows(self, state: DecodeState) -> list[Row] | None:
        """Chains of the tokens that follow in the earlier answers, as far as these were sampled
        again; None if too few rows have any."""
        rows, following = [], []
        most = max(min(OF_A_ROW, OF_A_BATCH // state.batch_size) - 1, 1)
        for sequence, tokens, active in zip(state.sequences.rows, state.tokens, state.active):
            emitted = tokens[self.prompts[sequence] :]
            if not active or emitted != [*self._left[sequence][: len(emitted)]]:
                self._left[sequence] = ()
            following.append(self._left[sequence][len(emitted) :][: most + 1])
            drafted = following[-1][:most]
            size = len(drafted) + 1
            rows.append(Row([*range(-1, size - 1)], [tokens[-1], *drafted], [1.0] * size))
        verified = sum(len(row.tokens) > 1 for row in rows)
        enough = verified >= max(SHARE * sum(state.active), 1)
        if state.noise is not None and self.history.lenience > 1:
            favored = following if enough else [()] * len(rows)
            state.noise.favor(favored, self.history.lenience)
        return rows if enough else None
