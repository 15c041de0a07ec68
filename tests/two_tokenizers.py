"""Tokenizers of few tokens for the tiny models, which write the same texts in different ways."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

#: Of one token each.
LETTERS = tuple(" abcdefghijklmnopqrstuvwxyz")
SPECIAL = ("<pad>", "<s>", "</s>")
#: Texts of a tokenizer of 61 tokens with these special ones.
WORDS = (
    "th", "the", "in", "ing", "er", "an", "and", " t", " th", " the", " a", " an", "on", "re",
    " s", "ed", " w", "en", "at", "es", "or", " o", " of", "is", "it", "ar", "al", " p", "st",
    "le", "me",
)  # fmt: skip


def written(text: str | bytes, kind: str) -> str:
    """A text as tokens of a kind of tokenizer write it."""
    if kind == "sentencepiece":
        assert isinstance(text, str)
        return text.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
    letters = bytes_to_unicode()
    return "".join(letters[byte] for byte in (text.encode() if isinstance(text, str) else text))


def make(
    texts: Sequence[str | bytes], kind: str = "byte level", special: Sequence[str] = SPECIAL,
    begins: bool = False,
) -> Any:  # fmt: skip
    """A tokenizer.

    Args:
        texts: of its tokens, by id after the special ones.
        kind: byte level or sentencepiece.
        special: for padding, the beginning and the end, and others.
        begins: whether it puts the second one before each text.
    """
    tokens = [written(text, kind) for text in texts]
    known = {token: id for id, token in enumerate([*special, *tokens])}
    splits = ((token[:end], token[end:]) for token in tokens for end in range(1, len(token)))
    merges = sorted((pair for pair in splits if known.keys() >= {*pair}), key=lambda pair: pair[0])
    merges.sort(key=lambda pair: len("".join(pair)))
    if kind == "byte level":
        backend = Tokenizer(models.BPE(vocab=known, merges=merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend = Tokenizer(models.BPE(vocab=known, merges=merges, byte_fallback=True))
        space = written(" ", kind)
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(space), normalizers.Replace(" ", space)]
        )
        backend.decoder = decoders.Sequence(
            [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    pad, begin, end, *others = special
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"], special_tokens=[(begin, known[begin])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, bos_token=begin, eos_token=end,
        extra_special_tokens=others,
    )  # fmt: skip


def of_words(**given: Any) -> Any:
    """That of the tiny models, all of whose tokens are in :data:`WORDS` and :data:`LETTERS`."""
    return make([*LETTERS, *WORDS], **given)
