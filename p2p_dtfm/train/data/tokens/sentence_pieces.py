"""Tokenizers of Llama 1 and 2, TinyLlama and what was made of them: SentencePiece's pairs as a
tokenizer.json.

Tokens are characters and merges of them. A space is written as U+2581. A character that is no token
is written as a token for each of its bytes (`<0x41>`). A text begins with one such space, put
before it, and its middle does not. So whoever encodes a text in parts says which parts go on.

As with byte-level pairs, only vocabulary and merges of a file from elsewhere are used, after
checks. What comes before and after merges must be one of the ways that are known here.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import tokenizers
from msgspec import Meta
from tokenizers import decoders, models, normalizers, pre_tokenizers

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.train.data.byte_pairs import require_all_bytes, require_merges_within

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""U+2581, which stands for a space."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))

_Piece = Annotated[str, Meta(min_length=1, max_length=1 << 16)]
Beginning = Literal["prepend", "always", "first", "never"]
"""When a space is put before a text. `prepend`: always. `always` and `first`: only where the text
does not begin with one. Of the parts between control tokens, `first` puts one before the first
alone."""


class SentencePieces:
    """A vocabulary of pieces of text, and the 256 bytes."""

    start_of_document: int | None = None

    def __init__(
        self,
        vocabulary: dict[str, int],
        merges: list[tuple[str, str]],
        beginning: Beginning,
        strips: bool,
    ) -> None:
        self.vocabulary = len(vocabulary)
        self.end_of_document = vocabulary[BYTE_PIECES[0]]
        self._beginning, self._strips = beginning, strips
        self._inner = _assemble(models.BPE(vocabulary, merges, byte_fallback=True), beginning)
        self._inner.decoder = _decoder(strips)
        self._going_on = self._inner
        if beginning != "never":
            model = models.BPE(vocabulary, merges, byte_fallback=True)
            self._going_on = _assemble(model, "never")
        self._bytes_of = {vocabulary[piece]: byte for byte, piece in enumerate(BYTE_PIECES)}
        self._pieces = [""] * self.vocabulary
        for piece, token in vocabulary.items():
            self._pieces[token] = piece.replace(SPACE, " ")

    @classmethod
    def from_bytes(cls, payload: bytes) -> "SentencePieces":
        """Read a tokenizer.json. Raises `PeerFault`."""
        try:
            file = msgspec.json.decode(payload, type=_PiecesFile)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise PeerFault(f"not a tokenizer like Llama's: {error}") from error
        require_all_bytes(file.model.vocab, BYTE_PIECES)
        require_merges_within(file.model.vocab, file.model.merges)
        return cls(file.model.vocab, file.model.merges, _beginning(file), _strips(file))

    @property
    def begins_after_control(self) -> bool:
        return self._beginning in ("prepend", "always")

    def encode(self, text: str) -> np.ndarray:
        return self.encode_bytes(text.encode("utf-8", errors="replace"))

    def encode_bytes(self, text: bytes) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(
        self, texts: Sequence[bytes], goes_on: Sequence[bool] | None = None
    ) -> list[np.ndarray]:
        """`goes_on`: for each text, whether it is the middle of one."""
        if goes_on is None:
            goes_on = [False] * len(texts)
        tokens: list[np.ndarray] = [np.empty(0, np.uint32)] * len(texts)
        for inner, middle in ((self._inner, False), (self._going_on, True)):
            places = [place for place, going in enumerate(goes_on) if going is middle]
            chosen = [texts[place].decode("utf-8", "replace") for place in places]
            for place, encoding in zip(places, inner.encode_batch_fast(chosen), strict=True):
                tokens[place] = np.array(encoding.ids, dtype=np.uint32)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        text = self.decode_on(tokens)
        return text.removeprefix(" ") if self._strips else text

    def decode_on(self, tokens: Iterable[int]) -> str:
        """The text of tokens that stand in the middle of a text."""
        parts: list[str] = []
        run = bytearray()
        for token in map(int, tokens):
            byte = self._bytes_of.get(token)
            if byte is not None:
                run.append(byte)
                continue
            parts.append(_text_of(run))
            run.clear()
            is_known = 0 <= token < self.vocabulary
            parts.append(self._pieces[token] if is_known else _REPLACEMENT)
        parts.append(_text_of(run))
        return "".join(parts)

    def to_bytes(self) -> bytes:
        return self._inner.to_str().encode("utf-8")


def is_like_llamas(payload: bytes) -> bool:
    """Whether a tokenizer.json writes unknown characters as bytes, as SentencePiece's do."""
    try:
        return msgspec.json.decode(payload, type=_Glance).model.byte_fallback
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False


def _text_of(run: bytearray) -> str:
    """The text of a run of bytes: all of them together are characters, or none of them is."""
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return _REPLACEMENT * len(run)


class _Verbatim(msgspec.Struct, rename={"string": "String"}):
    string: str


class _Prepend(msgspec.Struct, tag_field="type", tag="Prepend"):
    prepend: str


class _Replace(msgspec.Struct, tag_field="type", tag="Replace"):
    pattern: _Verbatim
    content: str


class _Normalizers(msgspec.Struct, tag_field="type", tag="Sequence"):
    normalizers: Annotated[list[_Prepend | _Replace], Meta(max_length=2)]


class _Metaspace(msgspec.Struct, tag_field="type", tag="Metaspace"):
    replacement: str = SPACE
    prepend_scheme: Literal["always", "first", "never"] = "always"
    split: bool = True
    add_prefix_space: bool | None = None


class _ByteFallback(msgspec.Struct, tag_field="type", tag="ByteFallback"):
    pass


class _Fuse(msgspec.Struct, tag_field="type", tag="Fuse"):
    pass


class _Strip(msgspec.Struct, tag_field="type", tag="Strip"):
    content: str
    start: int
    stop: int


class _Decoders(msgspec.Struct, tag_field="type", tag="Sequence"):
    decoders: Annotated[list[_Replace | _ByteFallback | _Fuse | _Strip], Meta(max_length=4)]


class _PiecesModel(msgspec.Struct):
    type: Literal["BPE"]
    byte_fallback: Literal[True]
    vocab: Annotated[dict[_Piece, int], Meta(min_length=257, max_length=1 << 20)]
    merges: Annotated[list[tuple[str, str]], Meta(max_length=1 << 22)]
    dropout: None = None
    continuing_subword_prefix: Literal[""] | None = None
    end_of_word_suffix: Literal[""] | None = None
    ignore_merges: Literal[False] = False


class _PiecesFile(msgspec.Struct):
    """The parts of tokenizer.json that change encoding and decoding. `unk_token` is ignored, as all
    bytes are known."""

    model: _PiecesModel
    decoder: _Decoders
    normalizer: _Normalizers | _Prepend | _Replace | None = None
    pre_tokenizer: _Metaspace | None = None
    truncation: None = None
    padding: None = None
    post_processor: None = None
    added_tokens: Annotated[list[Any], Meta(max_length=0)] = msgspec.field(default_factory=list)


class _GlanceAtModel(msgspec.Struct):
    byte_fallback: bool = False


class _Glance(msgspec.Struct):
    model: _GlanceAtModel


_WRITES_SPACES = _Replace(_Verbatim(" "), SPACE)
_READS_SPACES = _Replace(_Verbatim(SPACE), " ")
_DECODING = [_READS_SPACES, _ByteFallback(), _Fuse()]
_STRIPPING = [*_DECODING, _Strip(" ", 1, 0)]


def _beginning(file: _PiecesFile) -> Beginning:
    """When a space is put before a text. Raises `PeerFault` for a way that is not known here."""
    before, between = file.normalizer, file.pre_tokenizer
    steps = before.normalizers if isinstance(before, _Normalizers) else [before]
    if between is None and steps == [_Prepend(SPACE), _WRITES_SPACES]:
        return "prepend"
    if between is None and steps == [_WRITES_SPACES]:
        return "never"
    if before is None and between is not None:
        is_plain = between.replacement == SPACE and not between.split
        # two names of one thing, where a file has both
        agrees = between.add_prefix_space in (None, between.prepend_scheme != "never")
        if is_plain and agrees:
            return between.prepend_scheme
    raise PeerFault("tokenizer that writes spaces in a way this program does not")


def _strips(file: _PiecesFile) -> bool:
    """Whether decoding removes the space at the beginning. Raises `PeerFault`."""
    if file.decoder.decoders not in (_DECODING, _STRIPPING):
        raise PeerFault("tokenizer that makes text of tokens in a way this program does not")
    return file.decoder.decoders == _STRIPPING


def _assemble(model: models.BPE, beginning: Beginning) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    written = normalizers.Replace(" ", SPACE)
    if beginning == "prepend":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), written])
    elif beginning == "never":
        inner.normalizer = normalizers.Sequence([written])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=beginning, split=False)
    return inner


def _decoder(strips: bool) -> decoders.Sequence:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
