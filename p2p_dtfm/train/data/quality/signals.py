"""Quality signals that need nothing but the text, as RedPajama-V2 defines and names them.

*Words* are what lies between blanks in the text's normal form: decomposed, lower case, without
ASCII punctuation. *Raw words* are runs of letters and digits, and runs of anything else but blanks.
"""

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property, partial

from p2p_dtfm.train.data.quality.stop_words import ENGLISH

TEXT_LIMIT_BYTES = 1 << 20
"""Bytes of a document that are looked at: a longer one is judged by its beginning."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_RAW_WORD = re.compile(r"\w+|[^\w\s]+")
_SENTENCE = re.compile(r"\b[^.!?]+[.!?]*")
_LETTER = re.compile(r"[a-zA-Z]")
_SYMBOLS = ("#", "...", "…")
_DIGITS = 8

Value = float | None


class Text:
    """A document, with what several signals need of it."""

    def __init__(self, content: str) -> None:
        self.content = content

    @cached_property
    def normal(self) -> str:
        return unicodedata.normalize("NFD", self.content.lower().translate(_PUNCTUATION))

    @cached_property
    def words(self) -> list[str]:
        return self.normal.split()

    @cached_property
    def raw_words(self) -> list[str]:
        return _RAW_WORD.findall(self.content)

    @cached_property
    def characters(self) -> int:
        """How many characters all words have together."""
        return sum(map(len, self.words))

    def runs(self, length: int) -> list[tuple[str, ...]]:
        """All runs of `length` words; they overlap."""
        return list(zip(*(self.words[first:] for first in range(length)), strict=False))


def compute(name: str, text: Text) -> Value:
    """The value of one of `COMPUTED`; None if it means nothing, as the mean length of no words."""
    value = COMPUTED[name](text)
    return None if value is None else round(value, _DIGITS)


def _mean_word_length(text: Text) -> Value:
    return text.characters / len(text.words) if text.words else None


def _of_words(count: Callable[[Text], float], text: Text) -> Value:
    """A count divided by the number of words."""
    return count(text) / len(text.words) if text.words else None


def _of_raw_words(count: Callable[[Text], float], text: Text) -> Value:
    return count(text) / len(text.raw_words) if text.raw_words else None


def _symbols(text: Text) -> float:
    return sum(text.content.count(symbol) for symbol in _SYMBOLS)


def _stop_words(text: Text) -> Value:
    if not text.words:
        return 0.0
    return sum(word in ENGLISH for word in text.raw_words) / len(text.raw_words)


def _lines_that_trail_off(text: Text) -> Value:
    lines = text.content.removesuffix("\n").split("\n") if text.content else []
    if not lines:
        return None
    return sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)


def _entropy(text: Text) -> Value:
    if not text.words:
        return None
    shares = [count / len(text.words) for count in Counter(text.words).values()]
    return math.fsum(-share * math.log(share) for share in shares)


def _in_top_run(length: int, text: Text) -> Value:
    """The share of characters in the most frequent run, if that run comes more than once."""
    for run, count in Counter(text.runs(length)).most_common(1):
        if count > 1:
            return sum(map(len, run)) * count / text.characters
    return 0.0


def _in_repeated_runs(length: int, text: Text) -> Value:
    """The share of characters in runs that come more than once; no character counts twice."""
    runs = text.runs(length)
    counts = Counter(runs)
    repeated = bytearray(len(text.words))
    for first, run in enumerate(runs):
        if counts[run] > 1:
            repeated[first : first + length] = b"\1" * length
    inside = sum(len(word) for word, is_in in zip(text.words, repeated, strict=True) if is_in)
    return inside / text.characters if text.characters else 0.0


def _of_characters(text: str, *wanted: str) -> Value:
    return sum(map(text.count, wanted)) / len(text) if text else 0.0


COMPUTED: Mapping[str, Callable[[Text], Value]] = {
    "rps_doc_word_count": lambda text: len(text.words),
    "rps_doc_mean_word_length": _mean_word_length,
    "rps_doc_num_sentences": lambda text: len(_SENTENCE.findall(text.content)),
    "rps_doc_symbol_to_word_ratio": partial(_of_raw_words, _symbols),
    "rps_doc_stop_word_fraction": _stop_words,
    "rps_doc_frac_unique_words": partial(_of_words, lambda text: len(set(text.words))),
    "rps_doc_unigram_entropy": _entropy,
    "rps_doc_frac_all_caps_words": partial(
        _of_raw_words, lambda text: sum(map(str.isupper, text.raw_words))
    ),
    "rps_doc_frac_no_alph_words": partial(
        _of_raw_words, lambda text: sum(not _LETTER.search(word) for word in text.raw_words)
    ),
    "rps_doc_frac_lines_end_with_ellipsis": _lines_that_trail_off,
    "rps_doc_curly_bracket": lambda text: _of_characters(text.content, "{", "}"),
    "rps_doc_lorem_ipsum": lambda text: _of_characters(text.normal, "lorem ipsum"),
    **{f"rps_doc_frac_chars_top_{n}gram": partial(_in_top_run, n) for n in (2, 3, 4)},
    **{f"rps_doc_frac_chars_dupe_{n}grams": partial(_in_repeated_runs, n) for n in range(5, 11)},
}
