"""Caches in and out: the caller's own, ours across the turns of a chat, and those we refuse."""

import copy
import os
import pickle
import sys
from itertools import product
from typing import Any

import pytest
import torch
from adapter_oracle import lent
from allocations import allocations
from architectures import build
from conftest import CLOSE, EOS, PAD, STRATEGIES, Tiny, check_same, padded, plainly, prompt, ragged
from covering import EVERY_CASE
from recurrent_models import shared_recurrent
from running import CAPTURED, drafting
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from hf_spec.cache.tree_cache import TreeCache
from hf_spec.methods.registry import get_method
from hf_spec.modeling_patches.modules import CACHE, decoder_layers

Spec = dict[str, Any]

GREEDY = {"max_new_tokens": 16, "do_sample": False}
RETURNED = {**GREEDY, "return_dict_in_generate": True}
LOOKUP = drafting("prompt_lookup")
#: Full attention, sliding windows, both, learned positions.
KINDS = ("llama", "mistral", "gemma3", "gpt2")
#: An index in every layer, in every other one, and chunks.
OTHERS = ("deepseek_v32", "glm_moe_dsa", "dots3_note_text", "llama4_text")


def kinds_in_turn(first: int, more: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Each kind with a strategy, another one in the test after it; ``more`` with lookups."""
    names = [*STRATEGIES]
    cases = [(kind, names[(first + place) % len(names)]) for place, kind in enumerate(KINDS)]
    if os.environ.get(EVERY_CASE):
        cases = [*product(KINDS, names)]
    cases += product(more, ["prompt_lookup"])
    return pytest.mark.parametrize(("architecture", "spec"), cases, indirect=["spec"])


def turn(seed: int, length: int = 6, rows: int = 1) -> torch.Tensor:
    return prompt(length, rows, seed=100 + seed)


@kinds_in_turn(0, OTHERS)
def test_users_dynamic_cache_is_filled_as_by_plain_generation(
    tiny: Tiny, spec: Spec, architecture: str
) -> None:
    model = build(architecture) if architecture in OTHERS else tiny(architecture)
    config = model.config.get_text_config(decoder=True)

    plain, ours = (DynamicCache(config=config) for _ in range(2))
    expected = model.generate(prompt(), **GREEDY, **{CACHE: plain})
    out = model.generate(prompt(), **RETURNED, **spec, **{CACHE: ours})
    assert out.sequences.tolist() == expected.tolist()
    assert out[CACHE] is ours
    assert ours.get_seq_length() == plain.get_seq_length() == 27
    for mine, theirs in zip(ours.layers, plain.layers):
        assert type(mine) is type(theirs)
        for name in ("keys", "values", "indexer_keys"):
            found, wanted = getattr(mine, name, None), getattr(theirs, name, None)
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
def test_what_a_cache_has_recorded_of_its_past_can_be_cut_off(
    tiny: Tiny, architecture: str
) -> None:
    """Also in windows: all that came since it was cut last."""
    model, caches, asked = tiny(architecture), [], prompt()
    for spec in ({}, LOOKUP):
        cache, ids = DynamicCache(config=model.config), asked
        cache.activate_past_recording()
        for number in range(3):
            out = model.generate(ids, **GREEDY, **spec, **{CACHE: cache})
            assert torch.equal(out, model.generate(ids, **GREEDY))
            if number < 2:
                cache.crop(-9)
                ids = torch.cat([out[:, :-10], turn(number)], 1)
        caches.append(cache)
    for mine, theirs in zip(caches[1].layers, caches[0].layers):
        assert mine.get_seq_length() == theirs.get_seq_length()
        for found, wanted in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            torch.testing.assert_close(found, wanted, **CLOSE)


def test_recurrent_layers_that_record_their_past_are_refused() -> None:
    model = shared_recurrent("lfm2")
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match=r"activate_past_recording.*Pass a DynamicCache"):
        model.generate(prompt(), **GREEDY, **LOOKUP, **{CACHE: cache})
    assert not cache.get_seq_length()


@kinds_in_turn(3, OTHERS)
def test_ragged_chat_with_a_tree_cache(tiny: Tiny, spec: Spec, architecture: str) -> None:
    """Rows end at different times, so that padding stands in the middle of the next prompt. Where
    plain generation counts it in windows, it must stand at the start."""
    model = build(architecture) if architecture in OTHERS else tiny(architecture)
    batch = ragged()
    free = plainly(model, **batch, **GREEDY)
    settings = {**GREEDY, "eos_token_id": [EOS, int(free[0, 16]), int(free[1, 20])]}
    settings["return_dict_in_generate"] = True
    out = model.generate(**batch, **settings, **spec)
    mask, cache = batch["attention_mask"], out[CACHE]
    for number in range(2):
        new = turn(number, rows=3)
        ids = torch.cat([out.sequences, new], dim=1)
        ended = real_until_eos(out.sequences[:, mask.shape[1] :], settings["eos_token_id"])
        mask = torch.cat([mask, ended, torch.ones_like(new)], dim=1)
        if architecture in ("mistral", "gemma3", "dots3_note_text", "llama4_text"):
            for known in ({}, {CACHE: cache}):
                with pytest.raises(ValueError, match="between the tokens of rows .*its window of"):
                    model.generate(ids, attention_mask=mask, **known, **settings, **spec)
            order = mask.argsort(dim=1, stable=True)  # padding first
            ids, mask = ids.gather(1, order), mask.gather(1, order)
        given = {"input_ids": ids, "attention_mask": mask, **settings}
        out = model.generate(**given, **spec, **{CACHE: cache})
        assert isinstance(cache, TreeCache) and out[CACHE] is cache
        assert out.sequences.tolist() == model.generate(**given).sequences.tolist()


def real_until_eos(tokens: torch.Tensor, eos: list[int]) -> torch.Tensor:
    is_eos = torch.isin(tokens, torch.tensor(eos))
    return (is_eos.long().cumsum(-1) - is_eos.long() == 0).long()


@pytest.mark.parametrize("kind", [DynamicCache, TreeCache])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_only_the_new_tokens(tiny: Tiny, spec: Spec, architecture: str, kind: type) -> None:
    """New tokens alone, with an attention mask of the full length; then plain generation goes on
    with the cache, and the strategy with what that has appended."""
    model = tiny(architecture)
    given = {} if kind is TreeCache else {CACHE: DynamicCache(config=model.config)}
    first = model.generate(prompt(), **RETURNED, **spec, **given)
    cache, sequences = first[CACHE], first.sequences
    assert isinstance(cache, kind)
    for number, (known, strategy) in enumerate(((27, spec), (0, {}), (0, spec))):
        ids = torch.cat([sequences, turn(number)], dim=1)
        sequences = plainly(model, inputs=ids, **GREEDY)
        out = model.generate(
            ids[:, known:], attention_mask=torch.ones_like(ids),
            **{CACHE: cache}, **GREEDY, **strategy,
        )  # fmt: skip
        assert out.tolist() == sequences[:, known:].tolist()


@pytest.mark.parametrize("architecture", KINDS)
def test_a_forward_with_gradients_continues_a_tree_cache(tiny: Tiny, architecture: str) -> None:
    """As it continues a DynamicCache; then so do calls."""
    model = tiny(architecture)
    past = DynamicCache(config=model.config)
    first = model.generate(prompt(), **GREEDY, **{CACHE: past})
    ours = model.generate(prompt(), **RETURNED, **LOOKUP)
    weights = list(model.parameters())
    found = []
    for cache in (past, ours[CACHE]):
        new = torch.cat([first[:, -1:], turn(0)], 1)
        logits = model(new, **{CACHE: cache}, use_cache=True).logits
        found.append([logits, *torch.autograd.grad(logits.square().sum(), weights)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    ids = torch.cat([first, turn(0), turn(1)], 1)
    check_same(model, {**LOOKUP, CACHE: ours[CACHE]}, ids, **GREEDY)


@kinds_in_turn(5)
def test_a_prompt_goes_on_from_where_it_parts_with_the_cache(
    tiny: Tiny, spec: Spec, architecture: str
) -> None:
    """The same prompt again, an edited one, an older turn, another conversation altogether."""
    model, settings = tiny(architecture), {**GREEDY, "max_new_tokens": 8}
    out = model.generate(**ragged(), **RETURNED, **spec)
    cache, mask = out[CACHE], torch.ones_like(out.sequences)
    mask[:, :12] = ragged()["attention_mask"]
    for length, changed in ((28, 27), (28, 20), (12, 12), (28, 28), (21, 3)):
        ids = out.sequences[:, :length].clone()
        ids[:, changed:] = ids[:, changed:] % 50 + 5
        ids = torch.cat([ids, turn(length, rows=3)], 1)[:, : max(length, 18)]
        given = torch.cat([mask[:, :length], torch.ones(3, 6).long()], 1)
        given = {"input_ids": ids, "attention_mask": given[:, : ids.shape[1]]}
        check_same(model, {**spec, CACHE: cache}, **given, **settings)


@pytest.mark.parametrize(
    ("name", "architecture", "chunk"),
    [("medusa", "llama", 4), ("bita", "gemma3", 4), ("space", "gpt2", 4), ("bita", "llama", 256)],
)
def test_rows_with_other_numbers_of_new_tokens(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, architecture: str, chunk: int
) -> None:
    """They end in other chunks; the first row parts with the cache early, the others go on."""
    monkeypatch.setattr("hf_spec.target.target.CHUNK", chunk)
    model, config = tiny(architecture), get_method(name).adapter_config
    columns: list[int] = []
    logits: list[int] = []
    assert config is not None
    with lent(model, config(), random=True):
        spec = {**RETURNED, **drafting(name)}
        cache = model.generate(**ragged((12, 5, 9)), **spec)[CACHE]
        known = [cache.tokens[0][:6], *cache.tokens[1:]]
        rows = [row + prompt(size, seed=5)[0].tolist() for row, size in zip(known, (13, 3, 5))]
        given = padded(rows)
        layer, head = decoder_layers(model)[0], model.get_output_embeddings()
        with (
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: columns.append([*args, *kwargs.values()][0].shape[1]),
                with_kwargs=True,
            ),
            head.register_forward_pre_hook(lambda _, args: logits.append(args[0].shape[1])),
        ):
            out = model.generate(**given, **spec, **{CACHE: cache})
    assert columns[0] == min(13, chunk) and logits[0] == 1, "what is shared is not forwarded again"
    assert out.sequences.tolist() == plainly(model, **given, **GREEDY).tolist()


class Sinks(DynamicCache):
    """Keeps the first two tokens and the last eight."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        seen = super().update(*args, **kwargs)
        for layer in self.layers:
            if layer.keys.shape[2] > 10:
                layer.keys = torch.cat([layer.keys[:, :, :2], layer.keys[:, :, -8:]], 2)
                layer.values = torch.cat([layer.values[:, :, :2], layer.values[:, :, -8:]], 2)
        return seen


def test_caches_that_do_more_are_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their own methods: of a class, of an object, of Transformers' classes themselves."""
    model, own, update = tiny(), type("DynamicLayer", (DynamicLayer,), {}), DynamicCache.update
    methods, layers, later = DynamicCache(), DynamicCache(config=model.config), DynamicCache()
    vars(methods)["update"] = lambda *args: update(methods, *args)
    vars(layers.layers[1])["crop"] = print
    later.layer_class_to_replicate = own
    of_own = DynamicCache()
    of_own.layers = [own() for _ in range(3)]
    for cache, message in (
        (Sinks(), "given cache is of type Sinks.*Pass a DynamicCache"),
        (type("Other", (StaticCache,), {})(config=model.config, max_cache_len=64), "StaticLayer"),
        (methods, r"own \(DynamicCache.update\).*without assistant_strategy"),
        (layers, r"own \(DynamicLayer.crop\)"),
        (later, "layer of type DynamicLayer"),
        (of_own, "layer of type DynamicLayer"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(prompt(), **{CACHE: cache}, **GREEDY, **LOOKUP)
    monkeypatch.setattr(DynamicLayer, "update", lambda *args, **kwargs: update(*args, **kwargs))
    with pytest.raises(ValueError, match=r"own \(DynamicLayer.update\)"):
        model.generate(prompt(), **GREEDY, **LOOKUP)


class QuantizedLayer(DynamicLayer):
    """As in Transformers by name, without its optional dependency."""


def test_caches_that_do_not_fit(tiny: Tiny, spec: Spec) -> None:
    """Of other kinds, of another conversation; and ragged rows, in plain generation and in a
    DynamicCache."""
    model = tiny()
    quantized, offloaded = DynamicCache(), DynamicCache()
    quantized.layers = [QuantizedLayer() for _ in range(3)]
    offloaded.offloading = True
    static = StaticCache(config=model.config, max_cache_len=64)
    settings = {**RETURNED, **spec}
    rows = model.generate(**ragged(), **settings)
    embedded = {"inputs_embeds": model.get_input_embeddings()(prompt()).detach()}
    unknown = model.generate(**embedded, **settings)  # its tokens are not known
    others = tiny("mistral").generate(prompt(), **settings)
    for cache, message in (
        (static, "given cache.*StaticLayer.*Pass a DynamicCache"),
        (quantized, "given cache.*QuantizedLayer.*Pass a DynamicCache"),
        (offloaded, "given cache.*offloaded.*Pass a DynamicCache"),
        (rows[CACHE], "3 rows, the prompt has 1"),
        (others[CACHE], "states of a Mistral.*, and the model is a Llama.* layers.*leave"),
        (unknown[CACHE], f"{CACHE} holds .27.*whole conversation"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(prompt(), **{CACHE: cache}, **settings)
    longer = torch.cat([rows.sequences, turn(0, rows=3)], dim=1)
    with pytest.raises(ValueError, match="rows of different lengths.*one by one"):
        model.generate(longer, **{CACHE: rows[CACHE]}, **GREEDY)
    row = {key: value[1:2] for key, value in ragged().items()}
    for given, reason in ((ragged(), "3 rows"), (row, "padding in attention_mask")):
        cache = DynamicCache(config=model.config)
        with pytest.raises(ValueError, match=f"DynamicCache as {CACHE} with {reason}: .*TreeCache"):
            model.generate(**given, **settings, **{CACHE: cache})
        assert not cache.get_seq_length()


def test_inputs_embeds(tiny: Tiny, spec: Spec) -> None:
    for architecture in ("llama", "gpt2"):
        model = tiny(architecture)
        embeds = ragged()
        embeds["inputs_embeds"] = model.get_input_embeddings()(embeds["input_ids"])
        expected = check_same(model, spec, **embeds, **GREEDY)
        del embeds["input_ids"]
        ours = model.generate(**embeds, **RETURNED, **spec)
        assert ours.sequences.tolist() == expected[:, 12:].tolist()  # new tokens only
        assert ours[CACHE].host_lengths == [27, 20, 24]


def test_a_pad_token_in_the_conversation_without_a_mask(tiny: Tiny) -> None:
    """generate takes it for padding, so that the prompt parts with the cache there."""
    model, ids = tiny(), torch.tensor([[5, PAD, 7, 8]])
    first = model.generate(ids, attention_mask=torch.ones_like(ids), **RETURNED, **LOOKUP)
    check_same(model, {**LOOKUP, CACHE: first[CACHE]}, torch.cat([first.sequences, turn(0)], 1))


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
def test_rows_of_other_lengths_go_on_at_the_last_positions(tiny: Tiny, architecture: str) -> None:
    """128 positions: a row near the last one is filled up beside one with more new tokens."""
    model, given = tiny(architecture), ragged((115, 10))
    first = model.generate(**given, **{**RETURNED, "max_new_tokens": 1}, **LOOKUP)
    ids = torch.cat([given["input_ids"], first.sequences[:, -1:], prompt(20, 2, seed=9)], 1)
    mask = torch.ones_like(ids)
    mask[:, :115] = given["attention_mask"]
    mask[0, 116:-2] = 0  # two new tokens beside twenty
    after = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 9}
    check_same(model, {**LOOKUP, CACHE: first[CACHE]}, **after)


@pytest.mark.parametrize(
    ("spec", "tokens", "settings"),
    [
        ("prompt_lookup", 10**8, "greedy"), ("layer_skip", 2**70, "greedy"),
        ("prompt_lookup", sys.maxsize - 100, "repetition_penalty"),
    ],
    indirect=["spec"],
)  # fmt: skip
def test_until_eos(tiny: Tiny, spec: Spec, tokens: int, settings: str) -> None:
    """A limit that means none takes no memory and overflows nothing, with caches of both kinds."""
    model = tiny()
    free = plainly(model, inputs=prompt(), **GREEDY)
    given = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": int(free[0, -1])}
    if settings != "greedy":
        given[settings] = 1.1
    plain = model.generate(prompt(), **given)
    with allocations() as allocated:
        out = model.generate(prompt(), **given, **spec, return_dict_in_generate=True)
        again = torch.cat([out.sequences, turn(0)], 1)
        few = {**GREEDY, "max_new_tokens": 2}
        model.generate(again, **few, **spec, **{CACHE: out[CACHE]})
        model.generate(prompt(), **given, **spec, **{CACHE: DynamicCache(config=model.config)})
    assert out.sequences.tolist() == plain.tolist()
    assert allocated.peak < 2**22  # caches of 512 slots ahead in 3 layers are a tenth of it


# -- what a caller reads -----------------------------------------------------------------------

#: What is done to a cache before it is read, by Transformers' own methods.
USES: dict[str, Any] = {
    "nothing": lambda cache: cache,
    "crop": lambda cache: cache.crop(-3) or cache,
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])) or cache,
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])) or cache,
    "repeat": lambda cache: cache.batch_repeat_interleave(2) or cache,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "a DynamicCache of it": lambda cache: DynamicCache(cache),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "deepseek_v32"])
def test_it_reads_as_the_one_of_plain_generation(tiny: Tiny, architecture: str, use: str) -> None:
    model = build(architecture) if architecture in OTHERS else tiny(architecture)
    if use == "crop" and architecture == "gemma3":
        pytest.skip("Transformers crops no window that has dropped tokens")
    caches = []
    for spec in ({}, LOOKUP):
        cache = model.generate(prompt(batch=2), **RETURNED, eos_token_id=None, **spec)[CACHE]
        assert isinstance(cache, TreeCache) == bool(spec)
        caches.append(USES[use](cache))
    plain, ours = caches
    assert len(ours) == len(plain) and ours.get_seq_length() == plain.get_seq_length()
    assert ours.is_sliding == plain.is_sliding
    for one, layer, other, stock in zip(ours, ours.layers, plain, plain.layers, strict=True):
        for mine, theirs in [*zip(one, other), (layer.keys, stock.keys),
                             (layer.values, stock.values)]:  # fmt: skip
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, **CLOSE)
        if getattr(stock, "indexer_keys", None) is not None and "Dynamic" not in use:
            torch.testing.assert_close(layer.indexer_keys, stock.indexer_keys, **CLOSE)


def test_what_cannot_be_read_or_written_is_refused(tiny: Tiny) -> None:
    ragged_rows = tiny().generate(**ragged((12, 5)), **RETURNED, **LOOKUP)[CACHE]
    with pytest.raises(ValueError, match=r"different lengths \[27, 20\].*copy.deepcopy"):
        next(iter(ragged_rows))
    row = copy.deepcopy(ragged_rows)
    row.batch_select_indices(torch.tensor([1]))
    assert row.layers[0].keys.shape[2] == 20
    layer = row.layers[0]
    with pytest.raises(ValueError, match="crop, reset.* of the cache.*DynamicCache"):
        layer.keys = layer.keys[:, :, :5]
    for change in (layer.crop, layer.reorder_cache, layer.batch_select_indices, layer.offload):
        with pytest.raises(ValueError, match="in common with the others"):
            change(torch.tensor([0]))


@pytest.mark.parametrize("rows", [1, 2])
def test_plain_generation_goes_on_where_no_padding_was_left_out(tiny: Tiny, rows: int) -> None:
    model = tiny()
    inputs = padded([row.tolist() for row in prompt(9, rows)])
    inputs = {name: torch.nn.functional.pad(own, (3, 0)) for name, own in inputs.items()}
    out = model.generate(**inputs, **RETURNED, **LOOKUP)
    cache, ids = out[CACHE], torch.cat([out.sequences, turn(0, rows=rows)], 1)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    given = {CACHE: copy.deepcopy(cache)}
    with pytest.raises(ValueError, match="padding among the tokens.*TreeCache"):
        model.generate(ids, attention_mask=mask, **GREEDY, **given)
    assert torch.equal(
        model.generate(ids[:, 3:], attention_mask=mask[:, 3:], **GREEDY, **given), expected[:, 3:]
    )
    check_same(model, {**LOOKUP, CACHE: cache}, ids, attention_mask=mask)


# -- copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_copies_go_on(tiny: Tiny, architecture: str, copied: Any) -> None:
    """Each by itself: what is written into one is not in the other."""
    model, inputs = tiny(architecture), ragged((12, 5))
    out = model.generate(**inputs, **RETURNED, **LOOKUP)
    cache = out[CACHE]
    other = copied(cache)
    assert other.tokens == cache.tokens
    for number, one in enumerate((cache, other)):
        ids = torch.cat([out.sequences, turn(number, rows=2)], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, 12:])], dim=1)
        check_same(model, {**LOOKUP, CACHE: one}, ids, attention_mask=mask)


def test_a_copy_of_a_compiled_call_does_not_hold_the_model(shallow: Tiny) -> None:
    """Nor slots that are not in use: a pickle is as large as the states."""
    model = shallow()
    compiled = {**CAPTURED, **LOOKUP, **RETURNED}
    out = model.generate(prompt(), **compiled)
    assert out[CACHE].capacity == 256
    data = pickle.dumps(out[CACHE])
    states = 2 * 27 * 2 * 8 * 4  # keys and values, tokens, heads, dim, bytes
    assert states < len(data) < states + 10_000
    ids = torch.cat([out.sequences, turn(0)], dim=1)
    ours = model.generate(ids, **{CACHE: pickle.loads(data)}, **compiled)
    assert ours.sequences.tolist() == plainly(model, inputs=ids, **GREEDY).tolist()
