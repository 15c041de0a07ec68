"""An assistant with another tokenizer: its tokens stand for the model's, where both have them."""

import copy
from collections import Counter
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import pytest
import torch
from conftest import Tiny, check_continued, check_same, padded, plainly, prompt, ragged
from covering import covering
from running import CAPTURED, drafting, no_forward
from step_by_hand import frontier
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from two_tokenizers import LETTERS, SPECIAL, WORDS, make, of_words

import hf_spec
from hf_spec.core.shapes import Row
from hf_spec.draft.translation import Assistant, Texts, Translation, translation
from hf_spec.methods.draft_model import DraftModelPredictor, TextPredictor
from hf_spec.methods.registry import get_method

GREEDY: dict[str, Any] = {"max_new_tokens": 11, "do_sample": False}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.8}
GIVEN = {"row": {"input_ids": prompt()}, "batch": ragged()}
#: Special tokens of an assistant: others, of the same roles.
OTHERS = ("<none>", "<begin>", "<end>")
#: Texts of assistants: of a smaller vocabulary, which lacks a third of the model's tokens, and of a
#: larger one with tokens that the model lacks, too; in another order.
SMALLER = [*reversed(LETTERS), *WORDS[:12]]
LARGER = [*reversed(WORDS[8:]), *LETTERS, "ab", "ba", "abc", " q", "zz", *map(str, range(10))]
KINDS = {
    "smaller": (SMALLER, {}),
    "larger": (LARGER, {"special": OTHERS, "begins": True}),
    "sentencepiece": (SMALLER, {"kind": "sentencepiece", "begins": True}),
}


def tokenizer_of(kind: str) -> Any:
    texts, given = KINDS[kind]
    return make(texts, **given)


def sized(model: Any, tokenizer: Any) -> Any:
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.bos_token_id = model.config.bos_token_id = tokenizer.bos_token_id
    return model


def drafts(assistant: Any, own: Any, targets: Any = None, **options: Any) -> dict[str, Any]:
    two = {"tokenizer": of_words() if targets is None else targets, "assistant_tokenizer": own}
    return {**drafting("draft_model", **options), "assistant_model": assistant, **two}


def between(model: Any, own: Any, targets: Any) -> Translation:
    """Whatever the assistant is."""
    return Translation(Texts(targets, 61), Texts(own, 99), 61, model.device)


def check_given(model: Any, spec: dict[str, Any], **call: Any) -> None:
    """Output equals plain generation's; that of a sampled batch, whose rows have numbers of their
    own with every strategy, equals that of steps without drafts."""
    if not call["do_sample"] or len(call["input_ids"]) == 1:
        check_same(model, spec, **call)
        return
    torch.manual_seed(3)
    expected = model.generate(**call, assistant_strategy="plain")
    torch.manual_seed(3)
    assert model.generate(**call, **spec).tolist() == expected.tolist()


def shuffled(model: Any) -> tuple[Any, Any]:
    """A model that computes the same with its tokens in another order, and its tokenizer."""
    order = torch.randperm(61, generator=torch.Generator().manual_seed(1)).tolist()
    texts = [*SPECIAL, *LETTERS, *WORDS]
    own = make([texts[id] for id in order if id > 2])
    places = own.convert_tokens_to_ids(of_words().convert_ids_to_tokens(list(range(61))))
    other = copy.deepcopy(model)
    weights = {
        id(one.weight): one for one in (other.get_input_embeddings(), other.get_output_embeddings())
    }  # which may be tied
    for embeddings in weights.values():
        embeddings.weight.data[places] = embeddings.weight.data.clone()
    return other, own


@pytest.mark.parametrize(
    ("tree", "given", "settings"), [*product(["adaptive", "chain"], GIVEN, [GREEDY, SAMPLED])]
)
def test_the_same_tokens_with_other_ids_draft_alike(
    tiny: Tiny, tree: str, given: str, settings: dict[str, Any]
) -> None:
    model = tiny("llama")
    alike = {**drafting("draft_model", tree=tree), "assistant_model": copy.deepcopy(model)}
    check_given(model, alike, **GIVEN[given], **settings)
    expected = hf_spec.last_stats(model)
    check_given(model, drafts(*shuffled(model), tree=tree), **GIVEN[given], **settings)
    found = hf_spec.last_stats(model)
    assert found.accepted_histogram == expected.accepted_histogram
    assert found.num_steps < 9, "a model that drafts for itself is always right"


def naively(tokens: list[int], targets: Any, own: Any) -> list[int]:
    """A text as an assistant reads it, written anew for each token."""
    ids: list[int] = []
    vocabulary = own.get_vocab()

    def partner(token: int) -> int | None:
        if token in targets.all_special_ids:
            named = vocabulary.get(targets.convert_ids_to_tokens(token))
            alike = {1: own.bos_token_id, 2: own.eos_token_id}.get(token)
            return alike if named is None else named
        text = targets.decode([token]).replace(" ", own.convert_ids_to_tokens(own_space)[-1])
        return vocabulary.get(text)

    own_space = own(" ", add_special_tokens=False)["input_ids"][-1]
    for lacks, some in groupby(tokens, lambda token: partner(token) is None):
        if not lacks:
            ids += [id for id in map(partner, some) if id is not None]
            continue
        letters = "".join(targets.decode([token], skip_special_tokens=True) for token in some)
        if letters:
            # A letter in front, which is dropped, as some put a space before a text.
            whole = own("q" + letters, add_special_tokens=False)["input_ids"]
            ids += whole[len(own("q", add_special_tokens=False)["input_ids"]) :]
    return ids


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_nodes_of_a_tree_are_as_the_assistant_alone(tiny: Tiny, fresh: Tiny, kind: str) -> None:
    """It reads what was committed in its own tokens, which are another number in each row."""
    targets, own, method = of_words(), tokenizer_of(kind), get_method("draft_model")
    assistant = sized(fresh("llama_tied"), own)
    given = Assistant(assistant, own, targets)
    made = method.make_drafter(tiny("llama"), method.parse_options({}), given)
    drafter: Any = made.predictor
    ids = drafter.token_ids.tolist()
    columns = [naively([id], targets, own) for id in ids]
    assert ids == sorted(ids) and all(len(one) == 1 for one in columns)
    batch = [[1, *prompt(7)[0].tolist(), 55], [48, *prompt(4, seed=1)[0].tolist()]]
    state: Any = SimpleNamespace(
        batch_size=2, tokens=batch, remaining=[9, 9], timed=False, do_sample=False,
        target=SimpleNamespace(graphs=None), prompt_part=3, between_parts=lambda: None,
    )  # fmt: skip
    drafter.start(state)
    begin = own("")["input_ids"]
    for step in range(3):
        drafter.catch_up(state)
        logits = drafter.level(frontier(0, torch.zeros(2, 1, dtype=torch.long)))
        paths: list[list[int]] = [[]]
        for depth in range(3):
            for row, node in product(range(2), range(len(paths))):
                read = naively(batch[row], targets, own)
                read = read if read[:1] == begin else begin + read
                after = [token for one in paths[node] for token in naively([one], targets, own)]
                alone = assistant(torch.tensor([read + after])).logits[0, -1]
                expected = alone[sum(columns, [])]
                torch.testing.assert_close(logits[row, node], expected, rtol=1e-4, atol=1e-4)
            tokens, parents = [ids[3 + depth], ids[9], ids[5]], [1, 0, 1] if depth else [0, 0, 0]
            paths = [paths[above] + [token] for above, token in zip(parents, tokens)]
            chosen = (torch.tensor([one] * 2) for one in (tokens, parents))
            logits = drafter.level(frontier(depth + 1, *chosen))
        drafter.finish()
        batch[0] += [59, 60, 11, 58, 4][: 3 * step or 1]  # the first two are of the model alone
        batch[1] += [6] * (step + 1)


@pytest.mark.parametrize(
    ("name", "kind", "given", "options", "settings"),
    covering(
        product(
            ["llama", "gemma3", "gpt2", "qwen3_next"], KINDS, GIVEN,
            [{}, {"tree": "chain"}, {"max_rows": 1}, {"lookup": True}], [GREEDY, SAMPLED],
        ),
        lambda name, kind, given, options, settings: [
            name, (kind, given), (str(options), given), (settings["do_sample"], given),
        ],
    ),
)  # fmt: skip
def test_output_is_the_models(
    tiny: Tiny, fresh: Tiny, name: str, kind: str, given: str, options: dict[str, Any],
    settings: dict[str, Any],
) -> None:  # fmt: skip
    """Models and assistants with recurrent states, learned positions and windows included."""
    own, recurrent = tokenizer_of(kind), name == "qwen3_next"
    model = architectures.build(name) if recurrent else tiny("llama")
    assistant = sized(copy.deepcopy(model) if recurrent else fresh(name), own)
    check_given(model, drafts(assistant, own, **options), **GIVEN[given], **settings)
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


def test_continued_and_compiled(tiny: Tiny, fresh: Tiny) -> None:
    own = tokenizer_of("larger")
    spec = drafts(sized(fresh("llama"), own), own)
    check_continued(tiny("llama_tied"), spec, **GREEDY)
    check_same(tiny("llama_tied"), {**spec, **CAPTURED}, **GIVEN["row"], **GREEDY)


def test_rows_that_join_others_go_on_with_what_they_have_read(tiny: Tiny) -> None:
    """The last one waits for one that ends, and then joins one that is under way."""
    model = tiny("llama_tied")
    spec = drafts(*shuffled(tiny("llama_tied")), tree="chain", max_depth=2)
    prompts = [prompt(length, seed=length) for length in (4, 9, 15)]
    ends = int(plainly(model, prompts[0], **GREEDY, eos_token_id=None)[0, 6])
    call = {**spec, **GREEDY, "eos_token_id": ends, "return_dict_in_generate": True}
    alone = [model.generate(one, **call) for one in prompts]
    new = [one.sequences[0, ids.shape[1] :].tolist() for one, ids in zip(alone, prompts)]
    assert len(new[0]) < len(new[1])
    call["assistant_kwargs"] = {**spec["assistant_kwargs"], "max_rows": 2}
    found = model.generate(**padded([ids[0].tolist() for ids in prompts]), **call)
    for row, expected in zip(found.sequences[:, 15:].tolist(), new):
        assert row[: len(expected)] == expected
    taken = sum((one.spec_stats.accepted_histogram for one in alone), Counter())
    assert found.spec_stats.accepted_histogram == taken


TEXTS = ["and the sting is then", " of an ear", "a  b", "the", " "]


@pytest.mark.parametrize(("kind", "text"), [*product(KINDS, TEXTS)])
def test_no_text_is_lost(tiny: Tiny, kind: str, text: str) -> None:
    own, targets = tokenizer_of(kind), of_words()
    found = between(tiny("llama"), own, targets)
    ids = targets(text)["input_ids"]
    assert found.longest >= max(len(found.read([id])) for id in ids)
    assert own.decode(found.read(ids)) == text
    special = [1, *ids, 2, 0]
    wanted = [own.bos_token_id, *found.read(ids), own.eos_token_id]
    assert found.read(special)[: len(wanted)] == wanted, "they have the same roles"
    assert found.begin(ids)[0] == (own.bos_token_id if own("")["input_ids"] else found.read(ids)[0])
    assert len(found.begin([])) == 1, "a text is never empty"


def test_parts_of_characters(tiny: Tiny) -> None:
    """Bytes that are no text by themselves are tokens of byte-level tokenizers, and of those of
    SentencePiece where nothing else writes a character."""
    snow = "\N{SNOWMAN}".encode()
    parts = [bytes([byte]) for byte in snow]
    targets = make([*LETTERS, snow[:2], *parts])
    ids = [len(SPECIAL) + len(LETTERS) + place for place in (0, 3)]
    own = make([*parts, *LETTERS])
    assert between(tiny("llama"), own, targets).read(ids) == [3, 4, 5]
    fallback = make([*(f"<0x{byte:02X}>" for byte in snow), *LETTERS], kind="sentencepiece")
    found = between(tiny("llama"), fallback, targets)
    assert found.read(ids) == [3, 4, 5] and found.read(ids[:1]) == [3, 4]
    whole = make([*LETTERS, "\N{SNOWMAN}"], kind="sentencepiece")
    assert between(tiny("llama"), whole, targets).read(ids) == [3 + len(LETTERS)]


def test_tokenizers_of_other_kinds(tiny: Tiny) -> None:
    """One that writes words as they are, and one that is not of the library tokenizers."""
    targets, words = of_words(), {word: id for id, word in enumerate(["?", *LETTERS[1:], "the"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    own = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    found = between(tiny("llama"), own, targets)
    ids = targets("the cat", add_special_tokens=False)["input_ids"]
    assert own.convert_ids_to_tokens(found.read(ids)) == ["the", "c", "?"]  # "at" is no word

    python = SimpleNamespace(
        get_vocab=of_words().get_vocab, added_tokens_decoder=of_words().added_tokens_decoder,
        encode=lambda text, add_special_tokens: [5] * len(text), bos_token_id=1,
    )  # fmt: skip
    lacking = {text: id for text, id in python.get_vocab().items() if id < 40}
    python.get_vocab = lambda: lacking
    assert Texts(python, 99).encode(b"abc") == [5, 5, 5]


def test_one_tokenizer_given_twice(tiny: Tiny) -> None:
    """As pipelines do where the models' vocabularies are padded to different sizes."""
    spec = drafts(tiny("llama_tied"), of_words())
    check_same(tiny("llama"), spec, **GIVEN["row"], **GREEDY)
    given = Assistant(tiny("llama_tied"), of_words(), of_words())
    assert translation(tiny("llama"), given) is None


def test_what_is_made_of_two_tokenizers_is_kept(tiny: Tiny, fresh: Tiny) -> None:
    """And made anew where one of them has got another token."""
    own, targets, model = tokenizer_of("smaller"), of_words(), tiny("llama")
    given = Assistant(sized(fresh("llama"), own), own, targets)
    first = translation(model, given)
    assert translation(model, given) is first
    own.add_tokens(["me"])
    given.model.resize_token_embeddings(len(own))
    later = translation(model, given)
    assert first is not None and later is not None
    assert len(later.token_ids) == len(first.token_ids) + 1


def test_with_stock_assisted_decoding(tiny: Tiny, fresh: Tiny) -> None:
    """It asks for a chain, which ends before a token that the model does not have."""
    own, targets, method = tokenizer_of("larger"), of_words(), get_method("draft_model")
    assistant, model = sized(fresh("llama"), own), tiny("llama_tied")
    given = Assistant(assistant, own, targets)
    drafter: Any = method.make_drafter(model, method.parse_options({}), given)
    ids = prompt()
    read = torch.tensor([drafter.predictor.translation.begin(ids[0].tolist())])
    plain = assistant.generate(read, max_new_tokens=8, do_sample=False)[0, read.shape[1] :]
    texts = {**targets.get_vocab(), "<end>": 2, "<begin>": 1}
    partners = [texts.get(token) for token in own.convert_ids_to_tokens(plain.tolist())]
    expected = partners[: partners.index(None)] if None in partners else partners
    found, _ = drafter.get_candidates(ids)
    assert found[0, ids.shape[1] :].tolist() == expected


def test_by_transformers_own_door_and_from_a_saved_configuration(
    tiny: Tiny, fresh: Tiny, tmp_path: Path
) -> None:
    own, model = tokenizer_of("smaller"), tiny("llama_tied")
    spec = drafts(sized(fresh("llama"), own), own)
    names = ("assistant_model", "tokenizer", "assistant_tokenizer")
    two = {name: spec[name] for name in names}
    check_same(model, {"custom_generate": hf_spec.generate, **two}, prompt(), **GREEDY)
    assert hf_spec.last_stats(model).strategy == "draft_model"

    def passed_on(*args: Any, **kwargs: Any) -> Any:
        return hf_spec.generate(*args, **kwargs, **two)

    check_same(model, {"custom_generate": passed_on}, prompt(), **GREEDY)
    assert hf_spec.last_stats(model).strategy == "draft_model"
    kwargs = {name: spec[name] for name in ("assistant_strategy", "assistant_kwargs")}
    hf_spec.SpecConfig(**kwargs, **GREEDY).save_pretrained(tmp_path)
    config = hf_spec.SpecConfig.from_pretrained(tmp_path)
    check_same(model, {"generation_config": config, **two}, prompt(), max_new_tokens=11)
    assert hf_spec.last_stats(model).num_drafted_tokens > 0


def test_refused(tiny: Tiny, fresh: Tiny) -> None:
    model, own = tiny(), tokenizer_of("smaller")
    assistant = sized(fresh("llama"), own)
    spec = drafts(assistant, own)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tokenizer": "abc"}, "tokenizer='str' has no get_vocab"),
        ({"tokenizer": tokenizer_of("larger")}, "tokenizer has .* and LlamaForCausalLM knows 61"),
        ({"tokenizer": None}, "assistant_tokenizer='.*' without tokenizer: .*generate.tokenizer="),
        ({**drafting("prompt_lookup"), "assistant_model": None}, "assistant_tokenizer=.*no assis"),
        ({"assistant_lookbehind": 3}, "assistant_lookbehind=3.*one by one"),
    ]  # fmt: skip
    with no_forward(model):
        for given, message in cases:
            with pytest.raises(ValueError, match=message):
                model.generate(prompt(), **{**GREEDY, **spec, **given})
    reads = {"assistant_model": architectures.assistant_for("shared", True)}
    with pytest.raises(ValueError, match="reads the model's states, so that its tokens are"):
        architectures.base_of("shared").generate(prompt(), **{**GREEDY, **spec, **reads})


def test_an_assistant_that_stock_decoding_has_changed(tiny: Tiny, fresh: Tiny) -> None:
    """Its embeddings are replaced, which nothing undoes."""
    own, model = tokenizer_of("larger"), tiny("llama_tied")
    spec = drafts(sized(fresh("llama"), own), own)
    stock = {key: value for key, value in spec.items() if not key.startswith("assistant_s")}
    del stock["assistant_kwargs"]
    torch.manual_seed(0)
    model.generate(prompt(), **SAMPLED, **stock)
    with pytest.raises(ValueError, match="LlamaForCausalLM has lost a part of its vocab.* anew"):
        model.generate(prompt(), **GREEDY, **spec)


#: Tokenizers with no token of several letters that the model has: bytes alone, and words of its
#: own; by name, with the ids of theirs.
APART = {
    "bytes": [bytes([byte]) for byte in range(32, 127)],
    "words": [*LETTERS, "he", "nd", "ve", "om", "ou", "te", " b", "ti", "ha", "to", "nt", "ea"],
    "sentencepiece": [*LETTERS, "he", "nd", "ve", "om", "ou", "te", "ti", "ha", "to", "nt", "ea"],
}


def apart(kind: str) -> Any:
    return make(APART[kind], kind="sentencepiece" if kind == "sentencepiece" else "byte level")


@pytest.mark.parametrize(
    ("kind", "given", "options", "settings"),
    covering(
        product(
            APART, GIVEN,
            [{}, {"tree": "chain"}, {"num_draft_tokens": 5}, {"max_rows": 1}, {"lookup": True}],
            [GREEDY, SAMPLED],
        ),
        lambda kind, given, options, settings: [
            (kind, given), (str(options), given), (settings["do_sample"], given),
        ],
    ),
)  # fmt: skip
def test_output_is_the_models_where_few_tokens_stand_for_each_other(
    tiny: Tiny, fresh: Tiny, kind: str, given: str, options: dict[str, Any],
    settings: dict[str, Any],
) -> None:  # fmt: skip
    own = apart(kind)
    spec = drafts(sized(fresh("llama"), own), own, **options)
    check_given(tiny("llama_tied"), spec, **GIVEN[given], **settings)
    some = (kind, options) != ("bytes", {"tree": "chain"})  # whose likeliest byte is no token here
    assert bool(hf_spec.last_stats(tiny("llama_tied")).num_drafted_tokens) == some


@pytest.mark.parametrize("kind", APART)
def test_drafts_have_the_text_of_the_assistants(tiny: Tiny, kind: str) -> None:
    """Of each path, written anew by the model's tokenizer; a token is as likely as the path down to
    the one its text ends in."""
    own, targets = apart(kind), of_words()
    found = between(tiny("llama"), own, targets)
    assert found.by_text and not between(tiny("llama"), tokenizer_of("smaller"), targets).by_text
    texts = ["the thin", "then", "sit"]
    tree = Row.root(0)
    for place, text in enumerate(texts, 1):
        # A letter in front, which is dropped, as some put a space before a text.
        ids = own("q" + text, add_special_tokens=False)["input_ids"]
        ids = ids[len(own("q", add_special_tokens=False)["input_ids"]) :]
        chances = [0.9 ** (place * order) for order in range(1, 1 + len(ids))]
        tree = tree.merge(Row([*range(-1, len(ids))], [0, *ids], [1.0, *chances]))
    end = len(tree.tokens) - 1
    tree.add(end, own.eos_token_id, 0.5 * tree.probs[end])  # special, so that nothing is written
    row = found.drafted(tree, 7)
    drafted = {targets.decode(row.path(node)) for node in range(len(row.tokens))}
    for text in texts:
        ids = targets(text)["input_ids"]
        assert {targets.decode(ids[:count]) for count in range(len(ids) + 1)} <= drafted
    assert all(any(text.startswith(one) for text in texts) for one in drafted)
    assert row.tokens[0] == 7 and row.probs == sorted(row.probs, reverse=True)
    first = own("qt", add_special_tokens=False)["input_ids"][-1]
    node = row.children[0, targets("th")["input_ids"][0]] if kind == "bytes" else None
    if node is not None:  # of two bytes, the second of which is less likely
        both = tree.children[tree.children[0, first], own("h")["input_ids"][-1]]
        assert row.probs[node] == tree.probs[both]


def test_the_same_model_by_text_is_mostly_right(tiny: Tiny) -> None:
    """Its tokens are those of the model, which nothing is told of."""
    model = tiny("llama")
    spec = drafts(*shuffled(model), tree="chain")
    made: Any = get_method("draft_model")
    options = made.parse_options(spec["assistant_kwargs"])
    given = Assistant(spec["assistant_model"], spec["assistant_tokenizer"], spec["tokenizer"])
    ids = prompt()
    expected = DraftModelPredictor(model, options, given).chain(ids)
    text = of_words().decode(expected, skip_special_tokens=True)
    found = TextPredictor(model, options, given).chain(ids)
    assert of_words().decode(found) == text
