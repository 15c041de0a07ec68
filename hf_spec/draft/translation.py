"""Between the tokens of a model and those of an assistant with another tokenizer.

Tokens of the same text stand for each other: token-level intersection (Timor et al., "Accelerating
LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", 2025,
section 4). An assistant drafts only such tokens. It reads every token of the model, the others as
the tokens that its own tokenizer makes of their text.

Where these are few, it drafts any of its own tokens, whose text the model's tokenizer writes anew,
as in string-level exact match (section 3). Whatever is drafted, tokens are verified.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_spec.core.device import to_device
from hf_spec.core.shapes import Row
from hf_spec.modeling_patches.weights import placement, vocabulary
from hf_spec.threads import locked, memory

#: How a space is written in the tokens of SentencePiece, and of byte-level BPE.
SENTENCEPIECE, BYTE_LEVEL = "\N{LOWER ONE EIGHTH BLOCK}", bytes_to_unicode()[ord(" ")]
#: A single byte in tokens of SentencePiece.
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
#: Share of a tokenizer's tokens for which its model may have no embeddings, as of added ones.
UNKNOWN = 0.1
#: Least share of the smaller vocabulary that both must have for tokens to stand for each other:
#: tokens of more than a byte, as a model rarely writes single ones.
LEAST_SHARED = 1 / 4
#: Tokens by their role, which stand for each other whatever their names are.
_BEGIN, _END = "bos_token_id", "eos_token_id"
#: In place of the assistant's token where there is none.
_NONE = -1


class Assistant(NamedTuple):
    """An assistant model and the two tokenizers of a call that gives both."""

    model: Any
    tokenizer: Any
    targets: Any

    @classmethod
    def of(cls, model: Any, targets: Any, tokenizer: Any) -> Any:
        """What drafts: the model, with the tokenizers if the call gives one for it.

        Args:
            targets: ``tokenizer`` of the call.
            tokenizer: its ``assistant_tokenizer``.

        Raises:
            ValueError: only the assistant's is given.
        """
        if model is None or tokenizer is None:
            return model
        if targets is None:
            raise ValueError(
                f"assistant_tokenizer={type(tokenizer).__name__!r} without tokenizer: to translate "
                "between the two, both are needed. Give the model's, too: generate(tokenizer=..., "
                "assistant_tokenizer=...)."
            )
        return cls(model, tokenizer, targets)


class Texts:
    """The text of each token of a tokenizer, as bytes: a token may be a part of a character.

    Args:
        tokenizer: of any kind.
        size: ids from this one on are left out: a model does not have them.

    Attributes:
        of_ids: by id; None for ids without a token.
        ids: by text; of several tokens that of the tokenizer's own choice.
        hidden: ids of special tokens, which are not text.
    """

    def __init__(self, tokenizer: Any, size: int):
        self.tokenizer, self._size = tokenizer, size
        known: dict[str, int] = tokenizer.get_vocab()
        self._space = next((sign for sign in (SENTENCEPIECE, BYTE_LEVEL) if sign in known), None)
        added = tokenizer.added_tokens_decoder
        self.hidden = {id for id, token in added.items() if token.special}
        self.of_ids: list[bytes | None] = [None] * (1 + max(known.values(), default=-1))
        self.ids: dict[bytes, int] = {}
        single: dict[bytes, int] = {}
        for token, id in sorted(known.items(), key=lambda item: item[1]):
            if id >= size:
                continue
            text = token.encode() if id in added else self._text(token)
            self.of_ids[id] = text
            is_byte = self._space == SENTENCEPIECE and _BYTE.fullmatch(token)
            (single if is_byte else self.ids).setdefault(text, id)
        # A byte's own token is the last resort of a tokenizer.
        self.ids = single | self.ids

    def of_role(self, role: str) -> int | None:
        """The token with a role, such as ``bos_token_id``; None if the model has none."""
        id: int | None = getattr(self.tokenizer, role, None)
        has = id is not None and id < len(self.of_ids) and self.of_ids[id] is not None
        return id if has else None

    def text(self, id: int) -> bytes:
        """That of a token; empty if it is special, or there is none."""
        if id in self.hidden or id >= len(self.of_ids):
            return b""
        return self.of_ids[id] or b""

    def _text(self, token: str) -> bytes:
        if self._space == BYTE_LEVEL and all(letter in _bytes_by_letter() for letter in token):
            return bytes(_bytes_by_letter()[letter] for letter in token)
        if self._space == SENTENCEPIECE:
            if byte := _BYTE.fullmatch(token):
                return bytes([int(byte[1], 16)])
            token = token.replace(SENTENCEPIECE, " ")
        return token.encode()

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a piece of text, which may begin and end within a word or a character."""
        return [id for id in self._encode(text) if id < self._size]

    def _encode(self, text: bytes) -> list[int]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or self._space is None:
            plain = text.decode(errors="ignore")
            found: list[int] = self.tokenizer.encode(plain, add_special_tokens=False)
            return found
        if self._space == BYTE_LEVEL:
            written = "".join(bytes_to_unicode()[byte] for byte in text)
        else:
            try:
                written = text.decode().replace(" ", SENTENCEPIECE)
            except UnicodeDecodeError:
                parts = (self.ids.get(bytes([byte])) for byte in text)
                return [id for id in parts if id is not None]
        # By the model alone: the steps before it would take the piece for a text of its own.
        return [token.id for token in backend.model.tokenize(written)]


@cache
def _bytes_by_letter() -> dict[str, int]:
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _pairs(targets: Texts, own: Texts) -> dict[int, int]:
    """The assistant's id of each token of a model that is drafted; no two have the same."""
    pairs = {targets.ids[text]: own.ids[text] for text in targets.ids.keys() & own.ids.keys()}
    for role in (_BEGIN, _END):
        id, theirs = targets.of_role(role), own.of_role(role)
        if id is None or theirs is None or id in pairs or theirs in pairs.values():
            continue
        pairs[id] = theirs
    return pairs


class Translation:
    """Between the tokens of a model and those of its assistant.

    Args:
        targets: texts of the model's tokens.
        own: texts of the assistant's.
        size: number of the model's tokens.
        device: of the assistant.

    Attributes:
        token_ids: ``(n,)`` int64, ascending, the model's tokens that the assistant has, too.
        columns: ``(n,)`` int64, the assistant's ids of these.
        by_own: the model's tokens that are drafted, by the assistant's ids.
        by_token: ``(size,)`` int64, the assistant's id of each token of the model; 0 where there is
            none.
        longest: most tokens of the assistant that a token of the model may become.
        same: whether all tokens have the same ids in both.
    """

    def __init__(self, targets: Texts, own: Texts, size: int, device: torch.device):
        self._targets, self._own = targets, own
        pairs = _pairs(targets, own)
        shared = sorted(pairs)
        self.by_own = {theirs: id for id, theirs in pairs.items()}
        #: The assistant's id of each token of the model.
        self._known = [
            pairs.get(id, _NONE if text is None else own.ids.get(text, _NONE))
            for id, text in enumerate(targets.of_ids)
        ]
        read = [id for id, text in enumerate(targets.of_ids) if text is not None]
        self.same = all(self._known[id] == id for id in read)
        outside = (len(targets.text(id)) for id in read if self._known[id] == _NONE)
        # Each byte is a token at most, and some tokenizers put a space before a text.
        self.longest = 1 + max(outside, default=0)
        by_token = [max(id, 0) for id in self._known[:size]]
        by_token += [0] * (size - len(by_token))
        self.token_ids = to_device(shared, device, torch.long)
        self.columns = to_device([pairs[id] for id in shared], device, torch.long)
        self.by_token = to_device(by_token, device, torch.long)
        begin = own.of_role(_BEGIN)
        #: What the assistant's tokenizer puts before a text.
        self._begin = [id for id in own.tokenizer("")["input_ids"][:1] if id == begin]
        self._filler = begin if begin is not None else next(iter(self.by_own), 0)

    @property
    def by_text(self) -> bool:
        """Whether too few tokens stand for each other."""
        known = self._targets.ids.keys(), self._own.ids.keys()
        both = sum(len(text) > 1 for text in known[0] & known[1])
        return both < LEAST_SHARED * min(map(len, known))

    def drafted(self, tree: Row, root: int) -> Row:
        """A draft tree of the assistant's tokens as one of the model's that has the same texts.

        Args:
            tree: a token of the model is as likely as the path down to the one its text ends in.
            root: the model's token.
        """
        found, below = Row.root(root), tree.below
        for end in (node for node in range(1, len(below)) if not below[node]):
            text, chances = b"", [1.0]
            for node in tree.nodes_to(end):
                part = self._own.text(tree.tokens[node])
                if not part:  # a special token, which ends the text
                    break
                text += part
                chances += [tree.probs[node]] * len(part)
            chain, reached = Row.root(root), 0
            for token in self._targets.encode(text):
                reached += len(self._targets.text(token))
                chain.add(len(chain.tokens) - 1, token, chances[min(reached, len(text))])
            found = found.merge(chain)
        return found.likeliest_first()

    def read(self, tokens: Sequence[int]) -> list[int]:
        """The model's tokens as the assistant reads them. Neighbors that it does not have are one
        piece of text; special tokens that it does not have are left out."""
        known, found = self._known, []
        ids = (known[token] if token < len(known) else _NONE for token in tokens)
        for outside, pairs in groupby(zip(ids, tokens), lambda pair: pair[0] == _NONE):
            if not outside:
                found += [id for id, _ in pairs]
                continue
            text = b"".join(self._targets.text(token) for _, token in pairs)
            found += self._own.encode(text) if text else []
        return found

    def begin(self, tokens: Sequence[int]) -> list[int]:
        """:meth:`read` of a whole text, of which at least one token is left."""
        found = self.read(tokens)
        if found[:1] != self._begin:
            found = self._begin + found
        return found or [self._filler]


@locked
def translation(model: Any, assistant: Assistant) -> Translation | None:
    """Between a model's tokens and its assistant's; None if all have the same ids.

    Raises:
        ValueError: what is given is no tokenizer, or one of another model.
    """
    drafts, size, device = assistant.model, vocabulary(model), placement(assistant.model).device
    tokenizers = assistant.targets, assistant.tokenizer
    for name, one in zip(("tokenizer", "assistant_tokenizer"), tokenizers):
        if not hasattr(one, "get_vocab"):
            raise ValueError(
                f"{name}={type(one).__name__!r} has no get_vocab(): give a tokenizer, such as "
                "AutoTokenizer.from_pretrained returns."
            )
    for name, one, owner in zip(("tokenizer", "assistant_tokenizer"), tokenizers, (model, drafts)):
        known_to = vocabulary(owner)
        if len(one) * (1 - UNKNOWN) > known_to:
            raise ValueError(
                f"{name} has {len(one)} tokens, and {type(owner).__name__} knows {known_to}: that "
                "is another model's. Give tokenizer=, the model's own, and assistant_tokenizer=, "
                "the assistant's."
            )
    key = (*map(id, tokenizers), *map(len, tokenizers), size, device)
    known, made = memory(drafts), None
    if known.get(Translation, (None,))[0] == key:
        made = known[Translation][1]
    if made is None:
        texts = Texts(tokenizers[0], size), Texts(tokenizers[1], vocabulary(drafts))
        made = Translation(*texts, size, device)
        known[Translation] = key, made  # which holds the tokenizers, so that ids stay theirs
    return None if made.same else made
