"""What `--keep` says: comparisons of signals with numbers, `and`, `or`, `not` and brackets.

Nothing in it is executed. The parts that `and` joins at the top are *rules*; each is counted by
itself.
"""

import difflib
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from p2p_dtfm.core.protocol.errors import UserError

LENGTH_LIMIT = 2000
RULES_LIMIT = 64
_DEPTH_LIMIT = 50

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign><=|>=|==|!=|<|>|\(|\)))",
    re.ASCII,
)
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_WORDS = ("and", "or", "not")
_USUAL = {
    "=": "write == for equality", "&": "write and", "|": "write or", "!": "write not",
    "=>": "write >=", "=<": "write <=", "\u2265": "write >=", "\u2264": "write <=",
}  # fmt: skip

Truth = bool | None
"""None if it cannot be said, since a document lacks a signal."""
Lookup = Callable[[str], float | None]
Condition = Callable[[Lookup], Truth]


class Rule(NamedTuple):
    """One of the conditions that must all hold."""

    text: str
    holds: Condition


class Rules(NamedTuple):
    """All rules of `--keep`."""

    rules: tuple[Rule, ...]
    names: tuple[str, ...]
    """The signals that the rules ask for, sorted."""

    def first_failed(self, lookup: Lookup) -> int | None:
        """Number of the first rule that fails, or None. It also fails if the document lacks the
        signal."""
        for number, rule in enumerate(self.rules):
            if rule.holds(lookup) is not True:
                return number
        return None


def parse_rules(text: str, known: Collection[str]) -> Rules:
    """Read an expression about the signals `known`. Raises `UserError` that names the place."""
    if len(text) > LENGTH_LIMIT:
        raise UserError(f"--keep has more than {LENGTH_LIMIT} characters", "shorten it")
    parser = _Parser(text, known)
    rules = parser.rules()
    if len(rules) > RULES_LIMIT:
        raise UserError(f"--keep has more than {RULES_LIMIT} rules", "put some into brackets")
    return Rules(tuple(rules), tuple(sorted(parser.names)))


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


class _Parser:
    """A parser by recursive descent; `and` binds more tightly than `or`, `not` most tightly."""

    def __init__(self, text: str, known: Collection[str]) -> None:
        self._text, self._known = text, known
        self._tokens = list(self._tokenize())
        self._place = self._depth = 0
        self.names: set[str] = set()

    def rules(self) -> list[Rule]:
        """The whole text; one rule if `or` stands at the top."""
        found: list[Rule] = []
        while True:
            start = self._next.start
            condition = self._not()
            found.append(Rule(self._between(start), condition))
            if not self._take("and"):
                break
        if self._next.text == "or":
            self._place, self._depth = 0, 0
            found = [Rule(self._text.strip(), self._or())]
        if self._next.kind != "end":
            raise self._wrong(f"{self._next.text!r} is not expected here", _BETWEEN)
        return found

    def _or(self) -> Condition:
        parts = [self._and()]
        while self._take("or"):
            parts.append(self._and())
        return parts[0] if len(parts) == 1 else lambda lookup: _any(p(lookup) for p in parts)

    def _and(self) -> Condition:
        parts = [self._not()]
        while self._take("and"):
            parts.append(self._not())
        return parts[0] if len(parts) == 1 else lambda lookup: _all(p(lookup) for p in parts)

    def _not(self) -> Condition:
        self._depth += 1
        if self._depth > _DEPTH_LIMIT:
            raise self._wrong("this is nested too deeply", "use fewer brackets")
        try:
            if self._take("not"):
                inner = self._not()
                return lambda lookup: _opposite(inner(lookup))
            if self._take("("):
                opened = self._tokens[self._place - 1]
                inner = self._or()
                if not self._take(")"):
                    raise self._wrong("this bracket is never closed", "add )", opened)
                return inner
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Condition:
        """A comparison of two operands or more: 0.1 < x < 0.5."""
        start = self._next
        operands, signs = [self._operand()], []
        while self._next.text in _COMPARE:
            signs.append(_COMPARE[self._advance().text])
            operands.append(self._operand())
        if not signs:
            raise self._wrong(
                f"{start.text!r} is not compared with anything", f"write {start.text} >= 0.5, say"
            )

        def holds(lookup: Lookup) -> Truth:
            values = [each if isinstance(each, float) else lookup(each) for each in operands]
            return _all(
                None if left is None or right is None else sign(left, right)
                for sign, left, right in zip(signs, values, values[1:], strict=False)
            )

        return holds

    def _operand(self) -> float | str:
        token = self._next
        if token.kind == "number":
            return float(self._advance().text)
        if token.kind != "name" or token.text in _WORDS:
            found = f"{token.text!r}" if token.text else "the end"
            raise self._wrong(f"a signal or a number is expected, not {found}", _BETWEEN)
        if token.text not in self._known:
            near = difflib.get_close_matches(token.text.lower(), self._known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(self._known)}"
            raise self._wrong(f"there is no signal {token.text!r}", hint)
        self.names.add(token.text)
        return self._advance().text

    def _tokenize(self) -> "list[_Token]":
        found, place = [], 0
        while self._text[place:].strip():
            match = _TOKEN.match(self._text, place)
            if match is None:
                start = len(self._text) - len(self._text[place:].lstrip())
                odd = self._text[start]
                fix = "use signals, numbers, comparisons, and, or, not, brackets"
                fix = _USUAL.get(self._text[start : start + 2], _USUAL.get(odd, fix))
                raise _error(self._text, start, f"{odd!r} means nothing here", fix)
            kind = match.lastgroup or ""
            found.append(_Token(kind, match[kind], match.start(kind)))
            place = match.end()
        return [*found, _Token("end", "", len(self._text))]

    @property
    def _next(self) -> _Token:
        return self._tokens[self._place]

    def _advance(self) -> _Token:
        self._place += 1
        return self._tokens[self._place - 1]

    def _take(self, text: str) -> bool:
        if self._next.text == text:
            self._place += 1
            return True
        return False

    def _between(self, start: int) -> str:
        return self._text[start : self._next.start].strip()

    def _wrong(self, cause: str, fix: str, token: _Token | None = None) -> UserError:
        return _error(self._text, (token or self._next).start, cause, fix)


_BETWEEN = "join comparisons with and, or: rps_doc_word_count >= 50 and rps_doc_num_sentences > 2"


def _error(text: str, place: int, cause: str, fix: str) -> UserError:
    shown = "".join(char if char.isprintable() else " " for char in text)
    return UserError(f"--keep: {cause} (character {place + 1})\n  {shown}\n  {' ' * place}^", fix)


def _all(truths: Iterable[Truth]) -> Truth:
    unknown = False
    for truth in truths:
        if truth is False:
            return False
        unknown = unknown or truth is None
    return None if unknown else True


def _any(truths: Iterable[Truth]) -> Truth:
    return _opposite(_all(_opposite(truth) for truth in truths))


def _opposite(truth: Truth) -> Truth:
    return None if truth is None else not truth
