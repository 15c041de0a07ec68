"""What a drafter reads: the target's hidden states, at exactly the tokens that were committed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import Tiny
from running import CAPTURED
from torch import Tensor
from transformers import DynamicCache

from hf_spec.core.verify import StepResult
from hf_spec.methods.prompt_lookup import PromptLookupDrafter
from hf_spec.modeling_patches.modules import CACHE
from hf_spec.target.hidden_states import Reads

LAYERS = (3, 0, 2)  # of three; the last one's states are the final ones


class Recorder:
    """Records what the drafter of each call reads, per sequence of the call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.read: dict[int, list[tuple[Tensor, Tensor]]] = {}
        recorder, select = self, PromptLookupDrafter.select

        def advance(drafter: Any, result: StepResult, hidden: Tensor) -> None:
            recorder.rows = recorder.rows or list(range(len(result.counts)))
            for place, row in enumerate(recorder.rows):
                count = int(result.counts[place])
                read = result.tokens[place, :count], hidden[place, :count]
                recorder.read.setdefault(row, []).append(read)

        def selects(drafter: Any, rows: Sequence[int]) -> None:
            select(drafter, rows)
            recorder.rows = [recorder.rows[row] for row in rows]

        monkeypatch.setattr(PromptLookupDrafter, "reads", Reads("committed", LAYERS))
        monkeypatch.setattr(PromptLookupDrafter, "advance", advance)
        monkeypatch.setattr(PromptLookupDrafter, "select", selects)

    def check(self, model: Any, sequences: Tensor, mask: Tensor, cached: int = 0) -> None:
        """Compare with stock states; ``cached`` tokens of the prompt were known before."""
        for row, parts in self.read.items():
            real = torch.cat([mask[row].bool(), torch.ones(sequences.shape[1]).bool()])
            ids = sequences[row][real[: sequences.shape[1]]]
            states = model(ids[None], output_hidden_states=True).hidden_states
            end, steps = cached, 0
            for tokens, part in parts:
                first, end = end, end + len(part)
                known = ids[first + 1 : end + 1]
                if len(known) < len(tokens):  # behind the end of the sequence
                    break
                assert torch.equal(tokens, known)
                expected = torch.cat([states[layer][0, first:end] for layer in LAYERS], -1)
                torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)
                steps += 1
            assert steps > 2, "too few steps to tell"
        self.rows, self.read = [], {}


def prompts(batch: int) -> tuple[Tensor, Tensor]:
    """Repetitive prompts, which lookups continue, with padding."""
    ids = torch.tensor([5, 6, 7, 8, 9] * 4).repeat(batch, 1) + torch.arange(batch)[:, None]
    mask = (torch.arange(20) >= 2 * torch.arange(batch)[:, None]).long()
    return ids * mask, mask


HOW: dict[str, Any] = {"max_new_tokens": 20, "assistant_strategy": "prompt_lookup"}


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "compiled"),
    [("llama", False), ("gemma3", False), ("gpt2", False), ("gemma3", True)],
)
def test_committed_states(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, architecture: str, compiled: bool
) -> None:
    model = tiny(architecture)
    recorder, more = Recorder(monkeypatch), CAPTURED if compiled else {}
    for batch in [3] if compiled else [1, 3]:  # each takes code of its own
        ids, mask = prompts(batch)
        for chunk in [None] if compiled else [None, 8]:
            sequences = model.generate(
                ids, attention_mask=mask, prefill_chunk_size=chunk, **HOW, **more
            )
            recorder.check(model, sequences, mask)


@torch.no_grad()
def test_continued_caches_bring_new_tokens_only(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    monkeypatch.setattr("hf_spec.target.target.CHUNK", 3)
    ids, mask = prompts(1)
    tree = model.generate(ids[:, :9], return_dict_in_generate=True, **HOW)[CACHE]
    stock = DynamicCache()
    model(ids[:, :9], **{CACHE: stock})
    recorder = Recorder(monkeypatch)
    for cache in (tree, stock):
        cached = min(cache.get_seq_length(), 9)
        sequences = model.generate(ids, **HOW, **{CACHE: cache})
        recorder.check(model, sequences, mask, cached)


def test_a_layer_that_does_not_exist(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookupDrafter, "reads", Reads("committed", (4,)))
    with pytest.raises(ValueError, match="layers .4,.: the model's are numbered 0 to 3"):
        tiny("llama").generate(prompts(1)[0], assistant_strategy="prompt_lookup")
