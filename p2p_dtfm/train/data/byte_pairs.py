"""Byte-level byte-pair encoding, trained offline; its file is a standard tokenizer.json.

Of a file from elsewhere only the vocabulary and the merges are used, after checks. Such a file can
also hold templates and special tokens: these are refused. Refused as well are patterns other than
those of well-known models, since a stranger's regular expression can keep a machine busy for ever.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import tokenizers
from msgspec import Meta
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from p2p_dtfm.core.protocol.errors import PeerFault

_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
KNOWN_PATTERNS = {
    rf"{_BEFORE_DIGITS}|\p{{N}}{{1,3}}{_AFTER_DIGITS}": "llama3",  # up to three digits together
    rf"{_BEFORE_DIGITS}|\p{{N}}{_AFTER_DIGITS}": "qwen2",  # digits alone; Qwen 3 as well
}
"""How texts may be split into words, besides GPT-2's way, which the library knows itself."""

_Piece = Annotated[str, Meta(min_length=1, max_length=1 << 16)]


class BytePairTokenizer:
    """A vocabulary of byte strings: all 256 single bytes, and merges of them."""

    begins_after_control = False
    start_of_document: int | None = None

    def __init__(
        self,
        vocabulary: dict[str, int],
        merges: list[tuple[str, str]],
        splitting: "Splitting | None" = None,
    ) -> None:
        self.vocabulary = len(vocabulary)
        self.end_of_document = vocabulary[_ZERO_BYTE]
        splitting = splitting or Splitting()
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting.ignore_merges)
        self._inner = _assemble(model, splitting)
        self._bytes_of = [b""] * self.vocabulary
        for piece, token in vocabulary.items():
            self._bytes_of[token] = bytes(SYMBOLS[symbol] for symbol in piece)

    @classmethod
    def train(cls, texts: Iterator[str], vocabulary: int) -> "BytePairTokenizer":
        """Learn merges until there are `vocabulary` tokens, or the text has no more pairs."""
        inner = _assemble(models.BPE(), Splitting())
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
            file = msgspec.json.decode(payload, type=_PairsFile)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise PeerFault(f"not a byte-level BPE tokenizer: {error}") from error
        if file.model.byte_fallback:
            raise PeerFault("tokenizer that applies merges in a way this program does not")
        _check(file.model.vocab, file.model.merges)
        splitting = Splitting(
            pattern=_pattern(file.pre_tokenizer),
            ignore_merges=file.model.ignore_merges,
            normalizes=file.normalizer is not None,
            single_digits=_has_single_digits(file.pre_tokenizer),
        )
        return cls(file.model.vocab, file.model.merges, splitting)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_bytes(text.encode("utf-8", errors="replace"))

    def encode_bytes(self, text: bytes) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(
        self, texts: Sequence[bytes], goes_on: Sequence[bool] | None = None
    ) -> list[np.ndarray]:
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

    decode_on = decode

    def to_bytes(self) -> bytes:
        return self._inner.to_str().encode("utf-8")


class Splitting(msgspec.Struct, frozen=True):
    """How text is prepared before merges."""

    pattern: str = ""
    """One of `KNOWN_PATTERNS`; empty: GPT-2's."""
    ignore_merges: bool = False
    """A word that is a token is not put together by merges."""
    normalizes: bool = False
    """Letters and their accents become one character (NFC)."""
    single_digits: bool = False
    """Each digit is a word, before GPT-2's way."""


class _ByteLevel(msgspec.Struct, tag_field="type", tag="ByteLevel"):
    add_prefix_space: bool = True
    use_regex: bool = True


class _Pattern(msgspec.Struct, rename={"regex": "Regex"}):
    regex: str


class _Split(msgspec.Struct, tag_field="type", tag="Split"):
    pattern: _Pattern
    behavior: Literal["Isolated"]
    invert: bool = False


class _Digits(msgspec.Struct, tag_field="type", tag="Digits"):
    individual_digits: bool = False


class _Sequence(msgspec.Struct, tag_field="type", tag="Sequence"):
    pretokenizers: tuple[_Split | _Digits, _ByteLevel]


class _Nfc(msgspec.Struct, tag_field="type", tag="NFC"):
    pass


class _PairsModel(msgspec.Struct):
    type: Literal["BPE"]
    vocab: Annotated[dict[_Piece, int], Meta(min_length=256, max_length=1 << 20)]
    merges: Annotated[list[tuple[str, str]], Meta(max_length=1 << 20)]
    dropout: None = None
    unk_token: None = None
    continuing_subword_prefix: Literal[""] | None = None
    end_of_word_suffix: Literal[""] | None = None
    byte_fallback: bool = False
    ignore_merges: bool = False


class _PairsFile(msgspec.Struct):
    """The parts of tokenizer.json that change how text is encoded."""

    pre_tokenizer: _ByteLevel | _Sequence
    model: _PairsModel
    normalizer: _Nfc | None = None
    truncation: None = None
    padding: None = None
    post_processor: None = None
    added_tokens: Annotated[list[Any], Meta(max_length=0)] = msgspec.field(default_factory=list)


def _pattern(pre_tokenizer: _ByteLevel | _Sequence) -> str:
    """How words are split, as in `Splitting`. Raises `PeerFault`."""
    if isinstance(pre_tokenizer, _ByteLevel):
        is_known = pre_tokenizer.use_regex and not pre_tokenizer.add_prefix_space
        pattern = ""
    else:
        split, after = pre_tokenizer.pretokenizers
        if isinstance(split, _Digits):
            pattern, is_known = "", split.individual_digits and after.use_regex
        else:
            pattern = split.pattern.regex
            is_known = not (split.invert or after.use_regex) and pattern in KNOWN_PATTERNS
        is_known = is_known and not after.add_prefix_space
    if not is_known:
        raise PeerFault("tokenizer that splits words in a way this program does not")
    return pattern


def _has_single_digits(pre_tokenizer: _ByteLevel | _Sequence) -> bool:
    if isinstance(pre_tokenizer, _ByteLevel):
        return False
    return isinstance(pre_tokenizer.pretokenizers[0], _Digits)


def _assemble(model: models.BPE, splitting: Splitting) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if splitting.pattern:
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif splitting.single_digits:
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if splitting.normalizes:
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    return inner


def _check(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    require_all_bytes(vocabulary, SYMBOLS)
    if any(symbol not in SYMBOLS for piece in vocabulary for symbol in piece):
        raise PeerFault("tokenizer with tokens that are no byte strings")
    require_merges_within(vocabulary, merges)


def require_all_bytes(vocabulary: dict[str, int], of_bytes: Iterable[str]) -> None:
    """Refuse a vocabulary on which the library would fail, or would quietly encode bytes to
    nothing. `of_bytes` are the pieces that stand for the 256 bytes. Raises `PeerFault`."""
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise PeerFault("tokenizer whose tokens are not numbered 0, 1, 2 ...")
    missing = [piece for piece in of_bytes if piece not in vocabulary]
    if missing:
        raise PeerFault(f"tokenizer that has no token for {len(missing)} of the 256 bytes")


def require_merges_within(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Refuse merges of pieces outside the vocabulary. Raises `PeerFault`."""
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
_OF_BYTES = {byte: symbol for symbol, byte in SYMBOLS.items()}


def spelt_in_symbols(text: str) -> str:
    """This text in symbols of bytes, as a piece of a vocabulary spells it."""
    return "".join(_OF_BYTES[byte] for byte in text.encode("utf-8", errors="replace"))


_ZERO_BYTE = next(symbol for symbol, byte in SYMBOLS.items() if byte == 0)
