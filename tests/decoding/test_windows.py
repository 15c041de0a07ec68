"""Sliding windows and chunks in contexts of many windows, whose layers keep the last tokens only:
the output is that of plain generation, and memory what Transformers' own cache takes."""

import copy
from typing import Any

import pytest
import torch
from architectures import build
from conftest import VOCAB, check_same, prompt, ragged, shared
from covering import covering
from recurrent_models import shared_recurrent
from replay import RECORDED
from running import CAPTURED, drafting
from test_method_contract import adapted, strategy
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.modeling_patches.modules import CACHE

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
RETURNED: dict[str, Any] = {**GREEDY, "return_dict_in_generate": True}
LOOKUP = drafting("prompt_lookup")
MODELS = {
    **{name: lambda name=name: shared(name) for name in ("gemma3", "mistral")},
    "llama4_text": lambda: build("llama4_text"),  # chunks
    "lfm3": lambda: shared_recurrent("lfm3"),  # states, too
}
WAYS = {"eager": {}, "captured": CAPTURED, "recorded": RECORDED}
#: By itself, with the model as its own assistant, in parts, with probes and a front.
SPECS: dict[str, dict[str, Any]] = {
    "prompt_lookup": LOOKUP,
    "layer_skip": drafting("layer_skip", skip_attention=[1], skip_mlp=[], num_draft_tokens=12),
    "draft_model": drafting("draft_model"),
}
LENGTHS = [(70,), (70, 8, 41), (3, 5, 4)]


pytestmark = pytest.mark.usefixtures("recorded")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of a window and the nodes of a step, smaller than trees."""
    for name in ("STEP", "NODES", "GROWTH"):
        monkeypatch.setattr(f"hf_spec.cache.attention.{name}", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("kind", "lengths", "name", "way"),
    covering(
        [(k, n, s, w) for k in MODELS for n in LENGTHS for s in SPECS for w in WAYS
         if s != "draft_model" or w == "eager"],  # else: test_probes_and_own_caches
        lambda kind, lengths, name, way: [
            (kind, lengths), (kind, name), (name == "prompt_lookup", way),
        ],
    ),
    ids=str,
)  # fmt: skip
def test_calls(kind: str, lengths: tuple[int, ...], name: str, way: str) -> None:
    model, spec = MODELS[kind](), {**SPECS[name], **WAYS[way]}
    if name == "draft_model":
        spec["assistant_model"] = model
    check_same(model, spec, **ragged(lengths), **GREEDY)


@pytest.mark.parametrize("kind", MODELS)
def test_rings_as_they_are(kind: str) -> None:
    """With 64 nodes; one comes round as the call runs, two have before."""
    way = RECORDED if kind == "gemma3" else {}
    check_same(MODELS[kind](), {**LOOKUP, **way}, **ragged((250, 8, 120)), **GREEDY)


@pytest.mark.parametrize(
    ("name", "variant", "way"),
    [("ppd", "adaptive", "eager"), ("bita", "wide", "recorded"), ("mtp", "adaptive", "eager")],
)
@pytest.mark.usefixtures("small")
def test_probes_and_own_caches(name: str, variant: str, way: str) -> None:
    """Blocks wider than the room that rings have; learned keys in front of them."""
    model = copy.deepcopy(shared("gemma3"))
    with adapted(model, name, variant):
        spec = {**strategy(name, variant), **WAYS[way]}
        for lengths in ((70,), (70, 8, 41)):
            check_same(model, spec, **ragged(lengths), **GREEDY)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["gemma3", "mistral", "llama4_text"])
def test_conversations(kind: str) -> None:
    """In one cache, ours and plain generation's in turns; a row of it, and several."""
    model, few = MODELS[kind](), {**GREEDY, "max_new_tokens": 12}
    returned = {**few, "return_dict_in_generate": True}
    for lengths in ((50,), (50, 8, 41)):
        ids, mask = ragged(lengths).values()
        cache: Any = None
        plain_cache, filled = (DynamicCache(config=model.config) for _ in range(2))
        for turn in range(4):
            whole = {"input_ids": ids, "attention_mask": mask}
            plain = model.generate(**whole, **returned, **{CACHE: plain_cache})
            plain_cache = plain[CACHE]
            if len(lengths) == 1:
                ours = model.generate(**whole, **returned, **LOOKUP, **{CACHE: filled})
                assert ours.sequences.tolist() == plain.sequences.tolist()
            own = {} if turn == 2 and len(lengths) == 1 else LOOKUP  # a stock call continues ours
            ours = model.generate(**whole, **returned, **own, **{CACHE: cache})
            assert ours.sequences.tolist() == plain.sequences.tolist()
            cache = ours[CACHE]
            assert isinstance(cache, TreeCache)
            for one, stock in zip(cache.layers, plain_cache.layers):
                assert one.is_sliding == stock.is_sliding
            new = prompt(9, len(lengths), seed=turn)
            ids = torch.cat([plain.sequences, new], 1)
            mask = torch.cat([mask, torch.ones(len(ids), 12 + 9).long()], 1)
            cache.count_appended()
        for _ in range(2):  # also once more: the answer is cut off
            check_same(model, {**LOOKUP, CACHE: cache}, ids, attention_mask=mask, **few)


def test_what_a_window_has_dropped_is_refused() -> None:
    """A row that is cut there is computed anew from the whole conversation; new tokens alone, and
    ``crop``, are refused by name."""
    model, batch = shared("mistral"), ragged((200, 150, 170))
    first = model.generate(**batch, **RETURNED, **LOOKUP)
    cache = first[CACHE]
    with pytest.raises(ValueError, match=r"crop\(-100\): rows of .* A sliding window drops"):
        cache.crop(-100)
    cache.truncate([100, 999, 999])
    assert cache.host_lengths[0] == 0 < cache.host_lengths[1]
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 28).long()], 1)
    ids = torch.cat([first.sequences, prompt(4, 3)], 1)
    with pytest.raises(ValueError, match=r"rows of \[0, 1.*Give the whole conversation"):
        model.generate(ids[:, -5:], attention_mask=mask, **GREEDY, **LOOKUP, **{CACHE: cache})
    check_same(model, {**LOOKUP, CACHE: cache}, ids, attention_mask=mask, **GREEDY)


#: Of the model whose memory is counted: as Gemma 3's, five layers in six have a window.
WINDOW, TEXT, LAYERS, HEADS, DIM = 64, 2_048, 12, 4, 32


def long_model() -> Any:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=DIM, sliding_window=WINDOW,
        max_position_embeddings=2 * TEXT, initializer_range=0.2, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("way", ["eager", "recorded"])
def test_bytes_of_a_long_context(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of stock's cache, 64 nodes for each layer with a window, and room to grow."""
    model = long_model()
    plain = model.generate(prompt(TEXT), **RETURNED)

    seen: list[TreeCache] = []
    begin = TreeCache.begin

    def watched(self: TreeCache, *args: Any, **kwargs: Any) -> int:
        seen.append(self)
        return begin(self, *args, **kwargs)

    monkeypatch.setattr(TreeCache, "begin", watched)
    spec = {**LOOKUP, **WAYS[way]}
    ours = model.generate(prompt(TEXT), **RETURNED, **spec)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    tensors = {one.data_ptr(): one.nbytes for one in seen[-1].states.tensors()}
    stock = sum(one.keys.nbytes + one.values.nbytes for one in plain[CACHE].layers)
    token = 2 * HEADS * DIM * 4
    rings = LAYERS * 5 // 6
    room = rings * 2 * 64 + (LAYERS - rings) * (TEXT if way != "eager" else TEXT // 8)
    assert sum(tensors.values()) < stock + room * token < 0.7 * LAYERS * TEXT * token
