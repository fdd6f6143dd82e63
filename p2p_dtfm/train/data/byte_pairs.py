"""Byte-level byte-pair encoding, trained offline; its file is a standard tokenizer.json.

Of a file from elsewhere only the vocabulary and the merges are used, after checks; patterns,
templates and special tokens that such a file can also hold are refused, since a regular expression
from a stranger can keep a machine busy for ever.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import tokenizers
from msgspec import Meta
from tokenizers import decoders, models, pre_tokenizers, trainers

from p2p_dtfm.core.protocol.errors import PeerFault

_Piece = Annotated[str, Meta(min_length=1, max_length=1 << 16)]


class BytePairTokenizer:
    """A vocabulary of byte strings: all 256 single bytes, and merges of them."""

    def __init__(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
        self.vocabulary = len(vocabulary)
        self._inner = _assemble(models.BPE(vocab=vocabulary, merges=merges))
        self._bytes_of = [b""] * self.vocabulary
        for piece, token in vocabulary.items():
            self._bytes_of[token] = bytes(SYMBOLS[symbol] for symbol in piece)

    @classmethod
    def train(cls, texts: Iterator[str], vocabulary: int) -> "BytePairTokenizer":
        """Learn merges until `vocabulary` tokens exist, or the text has no more pairs."""
        inner = _assemble(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            # a longer token hardly ever helps, and keeps the merge table of odd files small
            max_token_length=64,
        )
        inner.train_from_iterator(texts, trainer)
        return cls.from_bytes(inner.to_str().encode("utf-8"))

    @classmethod
    def from_bytes(cls, payload: bytes) -> "BytePairTokenizer":
        """Read a tokenizer.json. Raises `PeerFault`."""
        try:
            file = msgspec.json.decode(payload, type=_File)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise PeerFault(f"not a byte-level BPE tokenizer: {error}") from error
        if file.pre_tokenizer.add_prefix_space or not file.pre_tokenizer.use_regex:
            raise PeerFault("tokenizer that splits words in a way this program does not")
        if file.model.byte_fallback or file.model.ignore_merges:
            raise PeerFault("tokenizer that applies merges in a way this program does not")
        _check(file.model.vocab, file.model.merges)
        return cls(file.model.vocab, file.model.merges)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_bytes(text.encode("utf-8", errors="replace"))

    def encode_bytes(self, text: bytes) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        encodings = self._inner.encode_batch_fast(
            [text.decode("utf-8", "replace") for text in texts]
        )
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        # 0xFF occurs nowhere in UTF-8, so a token outside the vocabulary shows as U+FFFD
        return b"".join(
            self._bytes_of[token] if 0 <= token < self.vocabulary else b"\xff"
            for token in map(int, tokens)
        ).decode("utf-8", errors="replace")

    def to_bytes(self) -> bytes:
        return self._inner.to_str().encode("utf-8")


class _ByteLevel(msgspec.Struct):
    type: Literal["ByteLevel"]
    add_prefix_space: bool = True
    use_regex: bool = True


class _Model(msgspec.Struct):
    type: Literal["BPE"]
    vocab: Annotated[dict[_Piece, int], Meta(min_length=256, max_length=1 << 20)]
    merges: Annotated[list[tuple[str, str]], Meta(max_length=1 << 20)]
    dropout: None = None
    unk_token: None = None
    continuing_subword_prefix: Literal[""] | None = None
    end_of_word_suffix: Literal[""] | None = None
    byte_fallback: bool = False
    ignore_merges: bool = False


class _File(msgspec.Struct):
    """The parts of tokenizer.json that change what encoding does."""

    pre_tokenizer: _ByteLevel
    model: _Model
    normalizer: None = None
    truncation: None = None
    padding: None = None
    post_processor: None = None
    added_tokens: Annotated[list[Any], Meta(max_length=0)] = msgspec.field(default_factory=list)


def _assemble(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    return inner


def _check(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Refuse what the library would choke on or quietly encode to nothing."""
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise PeerFault("tokenizer whose tokens are not numbered 0, 1, 2 ...")
    missing = [symbol for symbol in SYMBOLS if symbol not in vocabulary]
    if missing:
        raise PeerFault(f"tokenizer that has no token for {len(missing)} of the 256 bytes")
    if any(symbol not in SYMBOLS for piece in vocabulary for symbol in piece):
        raise PeerFault("tokenizer with tokens that are no byte strings")
    for left, right in merges:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise PeerFault("tokenizer that merges into something outside its vocabulary")


def _symbols() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 as is, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(0x100 + place): byte for place, byte in enumerate(others)}


SYMBOLS = _symbols()
