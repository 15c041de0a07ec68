"""Draft tokens for Transformers' own assisted decoding."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator


class ChainGenerator(CandidateGenerator):
    """Gives stock assisted decoding a chain of draft tokens, at batch size 1."""

    @abstractmethod
    def chain(self, input_ids: Tensor) -> list[int]:
        """The likeliest tokens after a sequence, ``(1, seq)`` without padding."""

    @torch.no_grad()
    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """The interface of Transformers.

        Args:
            input_ids: ``(1, seq)``.

        Returns:
            ``(1, seq + candidates)`` ids followed by :meth:`chain`, and no logits.
        """
        chain = input_ids.new_tensor([self.chain(input_ids)])
        candidates: Any = torch.cat([input_ids, chain], dim=1)
        return candidates, None

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Stock decoding reports matches here."""
