"""Block drafters against what other programs compute: tests/fixtures/drafters/block_diffusion."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from step_by_hand import proposed
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.core.tree import Tree
from hf_spec.core.verify import StepResult
from hf_spec.draft.grow import grow
from hf_spec.predict.block_heads import codes_of
from hf_spec.predict.blocks import block_sequences, visible
from hf_spec.tools.transfer import importable

OURS = Path(__file__).parents[1] / "fixtures" / "drafters" / "block_diffusion"
SHARED = Path(__file__).parents[2].parent / "shared" / "drafters"
#: Variants that are copied, and others.
SMALL = [
    "dflash/tiny-llama-draft-vocab", "dflash/tiny-qwen3-window", "dspark/tiny-llama-gated",
    "dspark/tiny-qwen3-rnn", "dflash2/tiny-llama", "jetspec/tiny-llama", "domino/tiny-llama-shift",
    "dspine/tiny-qwen3", "xpress2/tiny-qwen3-fill", "lilicorr/tiny-llama",
]  # fmt: skip
LARGE = [
    "dflash/tiny-llama", "dflash/tiny-llama-one-layer", "dspark/tiny-llama-vanilla",
    "dspark/tiny-llama-fill", "jetspec/tiny-qwen3-default-ids", "jetspec/tiny-llama-bidirectional",
    "domino/tiny-qwen3", "domino/tiny-llama-prefix2", "dspine/tiny-llama",
    "xpress2/tiny-llama-anchor-draft-vocab",
]  # fmt: skip
#: Rounding of float32: the programs agree to 2e-6.
CLOSE = {"rtol": 0.0, "atol": 1e-5}


def folder_of(name: str) -> Path:
    for root in (OURS, SHARED):
        if (root / name).is_dir():
            return root / name
    pytest.skip(f"../shared/drafters/{name} is not there")


@cache
def base_of(name: str) -> Any:
    """A model with the embeddings of a fixture's base: the rest of it is not run."""
    kind = "qwen3" if "qwen3" in name else "llama"
    own, shared = OURS / f"base-{kind}.safetensors", SHARED / f"base/tiny-{kind}/model.safetensors"
    weights = load_file(own if own.is_file() else shared)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.get_input_embeddings().weight.data = weights["model.embed_tokens.weight"].float()
    model.get_output_embeddings().weight.data = weights["lm_head.weight"].float()
    return model


def drafter_of(name: str, layout: str = "drafter") -> Any:
    """A drafter of chains with an imported checkpoint."""
    kind = "dspark" if name.startswith("dspark") else "dflash"
    (method, reader), folder = importable(kind), folder_of(name) / layout
    tensors, model = load_file(folder / "model.safetensors"), base_of(name)
    tensors = {key: value for key, value in tensors.items() if reader.wants(key)}
    config = json.loads((folder / "config.json").read_text())
    fields, weights = reader.convert(tensors, config)
    adapter = f"{name}/{layout}".replace("/", "-")
    if adapter not in getattr(model, "peft_config", {}):
        model.add_adapter(method.adapter_config(**fields), adapter)
        module = model.spec_modules[f"type_{method.name}"].adapters[adapter]
        module.load_state_dict(weights)
    model.set_adapter(adapter)
    return method.make_drafter(model, method.parse_options({"tree": "chain"}))


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "drafter") for name in SMALL + LARGE] + [("dflash/tiny-llama", "drafter_zlab_layout")],
)
@torch.no_grad()
def test_a_block_is_that_of_the_reference(name: str, layout: str) -> None:
    """Context of several steps, each with some accepted tokens; the block's states and logits; and
    what a head makes of these."""
    whole = drafter_of(name, layout)
    drafter: Any = whole.predictor
    io, done = load_file(folder_of(name) / "io.safetensors"), 0
    log = json.loads((folder_of(name) / "meta.json").read_text())["log"]
    ids, width, distances = io["ids"], 64, drafter.network.config.distances
    state = SimpleNamespace(
        batch_size=2, max_depth=99, noise=None, timed=False, active=[True] * 2, grown=None,
        cache=TreeCache(1, 2, "cpu"),
        target=SimpleNamespace(graphs=None), root=ids[:, 0].expand(2),
    )  # fmt: skip
    whole.start(state)
    for step, entry in enumerate(log):
        committed = entry["committed"]
        count, root = committed - 1 - done, ids[:, committed - 1].expand(2)
        features = io[f"step{step}.features"].float()[0]
        # The first context comes in two parts, which are not those of the other row.
        for parts in [
            (slice(0, count - 1), slice(0, 3)),
            (slice(count - 1, count), slice(3, count)),
        ]:
            if step:
                parts = slice(0, count), slice(0, count)
            drafter.advance(*taken(features, ids[0, done + 1 : committed], parts))
            if step:
                break
        state.root = root
        tree = proposed(whole, state)
        first = io[f"step{step}.hidden"].shape[1] - distances
        found = {"hidden": drafter.hidden[..., :width], "logits": drafter.logits(drafter.hidden)}
        if "dspine" in name:
            found["pre_injection"] = drafter.hidden[..., width:]
        for key, value in found.items():
            check(value, io[f"step{step}.{key}"][:, first:])
        keys = io[f"step{step}.cache_keys"][:, :, : committed - 1]
        check(drafter.cache.layers[0].views["keys"][:, :, : committed - 1], keys)
        drafted, expected = tree.tokens[:, 1:], io[f"step{step}.draft_tokens"]
        if "xpress" in name:  # what its passes over the block end at
            expected = io[f"step{step}.tokens_after_pass"][-1:]
        assert drafted[:, : expected.shape[1]].tolist() == expected.tolist() * 2
        check_head(drafter, io, f"step{step}.", root, drafted, first)
        done = committed - 1


def check(found: Tensor, expected: Tensor) -> None:
    """Both rows are equal to the only one."""
    torch.testing.assert_close(found, expected.float().expand(2, *expected.shape[1:]), **CLOSE)


def check_head(
    drafter: Any, io: dict[str, Tensor], step: str, root: Tensor, drafted: Tensor, first: int
) -> None:
    """Logits given the tokens drafted before, and given others."""
    hidden, distances = drafter.hidden, drafter.network.config.distances
    if (head := drafter.markov_head) is not None:  # of some tokens as of all
        logits, states = drafter.logits(hidden)[:, :1], hidden[:, :1]
        among = logits.topk(7).indices
        given = logits, root[:, None], states
        whole = head.along(*given) if head.by_rank else head.given(*given)[0]
        states = head.prepare(logits, among, states)
        some, _ = head.given(logits.gather(-1, among), root[:, None], states, None, among)
        torch.testing.assert_close(some, whole.gather(-1, among), **CLOSE)
    before = torch.cat([root[:, None], drafted[:, :-1]], 1)
    if step + "candidate_scores" in io:
        ids = io[step + "candidate_ids"].expand(2, -1, -1)
        given = drafter.given(hidden, before)
        check(given.gather(-1, ids), io[step + "candidate_scores"])
        assert given.isfinite().sum(-1).unique().tolist() == [ids.shape[-1]]
    if step + "transition_scores" in io:
        ids = io[step + "candidate_ids"].expand(2, -1, -1)
        ahead = torch.cat([root[:, None, None].expand(-1, 1, ids.shape[-1]), ids[:, :-1]], 1)
        for place in range(ids.shape[-1]):
            given = drafter.given(hidden, ahead[..., place])
            check(given.gather(-1, ids), io[step + "transition_scores"][:, :, place])
            assert given.isfinite().sum(-1).unique().tolist() == [ids.shape[-1]]
    if step + "pair_scores" in io:  # after each candidate of the slot before
        ids, pairs = (
            io[step + x].expand(2, *io[step + x].shape[1:])
            for x in ("candidate_ids", "pair_scores")
        )
        size = ids.shape[-1]
        start = io[step + "start_scores"][:, None, None].expand(2, 1, size, -1)
        pairs = torch.cat([start, pairs], 1)
        for place in range(size):
            ahead = torch.cat([root[:, None], ids[:, :-1, place]], 1)
            given, plain = drafter.given(hidden, ahead), drafter.logits(hidden)
            shares = given.gather(-1, ids).log_softmax(-1)
            torch.testing.assert_close(shares, pairs[:, :, place].log_softmax(-1), **CLOSE)
            torch.testing.assert_close(given.logsumexp(-1), plain.logsumexp(-1), **CLOSE)
            assert (given != plain).sum(-1).max() <= size
    if step + "biased_logits" in io:
        previous = io[step + "previous_tokens"].expand(2, -1)
        sure = drafter.markov_head.confidence(previous, hidden)
        check(sure, io[step + "confidence_logits"].sigmoid().flatten(1))
        check(drafter.given(hidden, previous), io[step + "biased_logits"])
    if step + "corrected_logits" in io:
        check(drafter.given(hidden, before), io[step + "corrected_logits"][:, first:])
    if step + "forced_logits" in io:
        names = [name for name in ("forced_previous", "forced_tokens") if step + name in io]
        tokens = io[step + names[0]].expand(2, -1)
        tokens = tokens[:, first:] if "previous" in names[0] else tokens[:, :distances]
        chosen, drafter.markov_head.top_k = drafter.markov_head.top_k, None
        given = drafter.given(hidden, tokens)
        drafter.markov_head.top_k = chosen
        check(given, io[step + "forced_logits"][:, -distances:])
    if step + "accum_logp.tokens" in io:
        check_trees(drafter, io, step, root)


def check_trees(drafter: Any, io: dict[str, Tensor], step: str, root: Tensor) -> None:
    """JetSpec's trees have the probabilities that ours have; ours are as likely or likelier."""
    log_probs = drafter.logits(drafter.hidden)[0].log_softmax(-1)
    for rule in ("accum_logp", "top2gap_fanout"):
        tokens, parents, depths, scores = (
            io[f"{step}{rule}.{name}"] for name in ("tokens", "parents", "depth", "cum_logprob")
        )
        for node in range(1, len(tokens)):
            own = scores[parents[node]] + log_probs[depths[node] - 1, tokens[node]]
            torch.testing.assert_close(own, scores[node], **CLOSE)
        depth = drafter.depth
        predictions = drafter.levels(root, depth, 20)
        tree = Tree.unpacked(grow(predictions, root, len(tokens) - 1, depth))
        assert tree.host.probs[0].sum() > scores.exp().sum() - 1e-5


def taken(features: Tensor, tokens: Tensor, parts: tuple[slice, ...]) -> tuple[StepResult, Tensor]:
    """A result of rows that accept some tokens each, and their features, padded."""
    counts = torch.tensor([part.stop - part.start for part in parts])
    size = int(counts.max())
    given = torch.stack([features.roll(-part.start, 0)[:size] for part in parts])
    after = torch.stack([tokens.roll(-part.start)[:size] for part in parts])
    bonus = torch.stack([tokens[part.stop - 1] for part in parts])
    path = torch.arange(size).expand(len(parts), -1)
    return StepResult(path, counts, after, counts * 0, counts - 1, bonus), given


@pytest.mark.parametrize("name", SMALL + LARGE)
@torch.no_grad()
def test_training_runs_the_blocks_of_the_reference(name: str) -> None:
    """Blocks at several anchors of a sequence at once, in two rows with padding on either side."""
    drafter = drafter_of(name).predictor
    io, network = load_file(folder_of(name) / "io.safetensors"), drafter.network
    ids, features = io["ids"], io["base.features"].float()
    padded = torch.zeros(2, ids.shape[1] + 3, dtype=torch.long)
    states = features.new_zeros(2, ids.shape[1] + 3, features.shape[2])
    mask = torch.zeros_like(padded)
    anchors = io["train.anchors"].long() - 1  # speculators' anchor is the block's first token
    for row, start in enumerate((0, 3)):
        padded[row, start : start + ids.shape[1]] = ids[0]
        states[row, start : start + ids.shape[1]] = features[0]
        mask[row, start : start + ids.shape[1]] = 1
    both = torch.stack([anchors, anchors + 3])
    hidden = block_sequences(network, padded, mask, both, states)
    first = io["train.hidden"].shape[1] - hidden.shape[2]
    check(hidden[..., :64], io["train.hidden"][None, :, first:])
    if "dspine" in name:
        check(hidden[..., 64:], io["train.pre_injection"][None, :, first:])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("start", ["anchor", "query"])
def test_what_slots_see(start: str, both: bool, causal: bool) -> None:
    """A block of 4 at position 6 behind 6 tokens of context, with a window of 3."""
    config = SimpleNamespace(
        causal=causal, sliding_layers=[0], sliding_window=3, sliding_window_from=start,
        sliding_window_non_causal=both,
    )  # fmt: skip
    queries, keys = torch.arange(6, 10)[None], torch.arange(10)[None]
    known = torch.ones(1, 1, 4, 10, dtype=torch.bool)
    full, sliding = visible(config, known, torch.full((1, 4), 6), queries, keys)
    for query in range(6, 10):
        for key in range(10):
            seen = not causal or key <= query
            near = key >= 6 - 3 if start == "anchor" else abs(query - key) < 3
            assert full[0, 0, query - 6, key] == seen
            wanted = seen and near and (both or key <= query)
            assert sliding[0, 0, query - 6, key] == wanted


def test_codes_are_those_of_the_head() -> None:
    """Up to the signs of directions; random ones where the rows cannot be read."""
    name = "dspine/tiny-qwen3"
    expected = load_file(folder_of(name) / "io.safetensors")["transfer.codes_from_head"]
    rows = base_of(name).get_output_embeddings().weight
    codes, directions = codes_of(rows, 128, 64, expected.shape[1])
    torch.testing.assert_close(codes @ codes.T, expected @ expected.T, **CLOSE)
    assert directions.shape == (expected.shape[1], 64)
    assert codes_of(None, 128, 64, 32)[0].norm(dim=-1).allclose(torch.ones(128))
