"""Text to tokens and back: bytes by default, byte-pair encoding on request.

A tokenizer is a small JSON file that travels between peers by its hash. Nothing in it is executed.
"""

import copy
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.train.data.blob_store import BlobStore
from p2p_dtfm.train.data.manifest import TOKENIZER_LIMIT_BYTES, TokenizerEntry, load_part

END_OF_DOCUMENT = "\0"
"""The token of this character is written after each document, unless a model has its own token for
it. Text files hold no zero byte, so it means nothing else."""


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer. Tokens are 0 ... vocabulary - 1."""

    vocabulary: int
    end_of_document: int
    """The token after each document."""
    start_of_document: int | None
    """The token before each document, and before a text to be continued; None if there is none."""

    @property
    def begins_after_control(self) -> bool:
        """Whether text after a control token is encoded like the beginning of a text."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Tokens [t] of an unsigned or signed integer type."""
        ...

    def encode_bytes(self, text: bytes) -> np.ndarray:
        """The same tokens for UTF-8 bytes."""
        ...

    def encode_batch(
        self, texts: Sequence[bytes], goes_on: Sequence[bool] | None = None
    ) -> list[np.ndarray]:
        """The same for many texts at once, which may be faster. `goes_on`: for each text, whether
        it is the middle of one; without it each is a text of its own."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text. Bytes that are not UTF-8, and tokens outside the vocabulary, become U+FFFD."""
        ...

    def decode_on(self, tokens: Iterable[int]) -> str:
        """The text of tokens that stand in the middle of a text."""
        ...

    def to_bytes(self) -> bytes:
        """The file; `tokenizer_from_bytes` reads it."""
        ...


class ByteTokenizer:
    """Each byte of the UTF-8 text is one token."""

    vocabulary = 256
    end_of_document = 0
    start_of_document: int | None = None
    begins_after_control = False

    def encode(self, text: str) -> np.ndarray:
        return self.encode_bytes(text.encode("utf-8", errors="replace"))

    def encode_bytes(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def encode_batch(
        self, texts: Sequence[bytes], goes_on: Sequence[bool] | None = None
    ) -> list[np.ndarray]:
        return [self.encode_bytes(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        # 0xFF occurs nowhere in UTF-8, so a token outside the vocabulary shows as U+FFFD
        return bytes(token if 0 <= token < 256 else 0xFF for token in map(int, tokens)).decode(
            "utf-8", errors="replace"
        )

    decode_on = decode

    def to_bytes(self) -> bytes:
        return b'{"kind":"bytes"}'


def ending_with(tokenizer: Tokenizer, token: int | msgspec.UnsetType) -> Tokenizer:
    """The tokenizer with another token after each document; unchanged if no token is stated."""
    if not isinstance(token, int) or token == tokenizer.end_of_document:
        return tokenizer
    other = copy.copy(tokenizer)
    other.end_of_document = token
    return other


def starting_with(tokenizer: Tokenizer, token: int | None) -> Tokenizer:
    """The tokenizer with another token before each document, or with none."""
    if token == tokenizer.start_of_document:
        return tokenizer
    other = copy.copy(tokenizer)
    other.start_of_document = token
    return other


def as_stated(tokenizer: Tokenizer, entry: TokenizerEntry) -> Tokenizer:
    """The tokenizer with the tokens around each document that a manifest names."""
    start = entry.start_of_document
    tokenizer = starting_with(tokenizer, start if isinstance(start, int) else None)
    return ending_with(tokenizer, entry.end_of_document)


def entry_of(tokenizer: Tokenizer, store: BlobStore) -> TokenizerEntry:
    """A manifest's entry for the tokenizer, whose file goes into `store`. Raises OSError."""
    file = tokenizer.to_bytes()
    usual = tokenizer_from_bytes(file).end_of_document
    end, start = tokenizer.end_of_document, tokenizer.start_of_document
    return TokenizerEntry(
        store.put_bytes(file),
        len(file),
        tokenizer.vocabulary,
        msgspec.UNSET if end == usual else end,
        msgspec.UNSET if start is None else start,
    )


def tokenizer_from_bytes(payload: bytes) -> Tokenizer:
    """Read a tokenizer that a peer sent. Raises `PeerFault`."""
    if len(payload) > TOKENIZER_LIMIT_BYTES:
        raise PeerFault(f"tokenizer of {len(payload)} bytes, limit {TOKENIZER_LIMIT_BYTES}")
    try:
        kind = msgspec.json.decode(payload, type=_Kind).kind
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise PeerFault(f"not a tokenizer: {error}") from error
    if kind is msgspec.UNSET:
        # The library is loaded only for byte pairs.
        from p2p_dtfm.train.data.byte_pairs import BytePairTokenizer
        from p2p_dtfm.train.data.tokens.sentence_pieces import SentencePieces, is_like_llamas

        if is_like_llamas(payload):
            return SentencePieces.from_bytes(payload)
        return BytePairTokenizer.from_bytes(payload)
    if payload != ByteTokenizer().to_bytes():
        raise PeerFault(f"tokenizer of unknown kind {kind[:40]!r}")
    return ByteTokenizer()


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer file. Raises `UserError`."""
    fix = "make the data anew with p2p-dtfm prepare, or restore the file"
    name = f"tokenizer {path}"
    return load_part(path, name, TOKENIZER_LIMIT_BYTES, tokenizer_from_bytes, fix)


def require_tokenizer_of(model: Path, own: Tokenizer, data: str, given: Tokenizer) -> None:
    """Refuse data in another tokenizer's tokens than the model's own, which lies at `model`: there
    the same numbers mean other text. Raises `UserError`."""
    if given.to_bytes() != own.to_bytes():
        raise UserError(
            f"the data {data} are tokens of another tokenizer than {model}, which the model has "
            "learnt with",
            (
                "prepare the text with it, and set data.source to what comes out: "
                f"p2p-dtfm prepare TEXTS --out DATA --tokenizer {shlex.quote(str(model))}",
                "remove that file, if the model is to learn other tokens from the start",
            ),
        )


class _Kind(msgspec.Struct):
    """The one field that tells our byte file from a standard tokenizer.json."""

    kind: str | msgspec.UnsetType = msgspec.UNSET
