"""Amounts in words: one formatter, one system of units, "1 step" and "2 steps"."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import p2p_dtfm
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted, duration, rate_text
from tests.programs import skip_without
from tests.web import chromium as browser

ROOT = Path(p2p_dtfm.__file__).parent


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (85_914, "83.9 KiB"),
        (393_216, "384 KiB"),
        (-5 << 20, "-5.00 MiB"),
        (1 << 30, "1.00 GiB"),
        ((1 << 30) - 1000, "1.00 GiB"),
        (1023 << 20, "1,023 MiB"),
        (24 * (1 << 30) + (1 << 20), "24.0 GiB"),
        (5000 << 40, "5,000 TiB"),
    ],
)
def test_bytes_have_three_digits_in_binary_units(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_what_is_needed_is_never_said_too_small() -> None:
    assert bytes_text(24 * (1 << 30) + 1, rounded_up=True) == "24.1 GiB"
    assert bytes_text(24 << 30, rounded_up=True) == "24.0 GiB"
    assert bytes_text(1025, rounded_up=True) == "1.01 KiB"


@skip_without("browser", "" if browser.PROGRAM else "no Chromium here: apt-get install chromium")
def test_the_page_says_the_same(tmp_path: Path) -> None:
    """A test with a browser compares the two formatters, one for each language."""
    values = [0, 1, 999, 1023, 1024, 85_914, 393_216, (1 << 30) - 1000, 1 << 30, 5000 << 40]
    values += [10**power * 37 // 7 for power in range(14)]
    values += [59, 60, 3599, 3600, 48 * 3600 - 1, 48 * 3600, 1_029_960, 86_400 * 1_234]
    source = (ROOT / "web" / "static" / "format.js").read_text().replace("export const", "const")
    source = source.replace("export function", "function")
    with browser.chromium(tmp_path / "profile") as page:
        found = page.evaluate(
            f"(() => {{ {source}; return {json.dumps(values)}.map("
            "(it) => [bytes(it), linkRate(it), some(it, 'step'), duration(it)]); })()"
        )
    for value, said in zip(values, found, strict=True):
        expected = [bytes_text(value), rate_text(value), counted(value, "step"), duration(value)]
        assert said == expected, value


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3_700, "0 s"),  # the clock was set back: "training for -2 h 58 min"
        (0, "0 s"),
        (59.9, "59 s"),
        (61, "1 min 1 s"),
        (3_600, "1 h 0 min"),
        (48 * 3_600 - 1, "47 h 59 min"),
        (48 * 3_600, "2 days 0 h"),
        (1_029_960, "11 days 22 h"),
        (86_400 * 1_234, "1,234 days 0 h"),
    ],
)
def test_times_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_links_are_in_bits() -> None:
    assert rate_text(25_000_000) == "200 Mbit/s"
    assert rate_text(128_000_000) == "1.02 Gbit/s"
    assert rate_text(100) == "800 bit/s"


def test_one_is_one() -> None:
    assert counted(1, "microbatch") == "1 microbatch"
    assert counted(0, "microbatch") == "0 microbatches"
    assert counted(1234.4, "step") == "1,234 steps"
    assert counted(0.6, "token") == "1 token"
    assert counted(1, "process") == "1 process" and counted(2, "process") == "2 processes"


OTHER_UNIT = re.compile(r"(?<![A-Za-z-])([kKMGT]B|[KMG]ib|[kKMG]bps)\b")


def test_no_text_of_the_program_has_another_unit() -> None:
    """The rule is for what the program says. Comments and docstrings measure as their sources
    did."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, text in said_in(path).texts
        if OTHER_UNIT.search(text)
    ]
    found += [
        f"{path.name}: {line.strip()}"
        for path in sorted((ROOT / "web" / "static").glob("*.[jh]*"))
        for line in path.read_text().splitlines()
        if OTHER_UNIT.search(line)
    ]
    assert not found, "\n".join(found)


SILENT_ROOMS = ("sim/faults", "testbed/virtual")
"""What is said elsewhere is read by people who may well have one peer."""
MANY = re.compile(
    r"^ (training |more |inner |layer )?(peers|members|steps|tokens|microbatches|pipelines|layers|"
    r"stages|spares|views|hours|days|files|processes|daemons|faults|blocks)\b"
    r"(?!/s| a second| $)"
)


REFUSED_UNLESS_ONE = (" members are called ",)


def test_what_is_counted_on_screens_may_be_one() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in sorted(ROOT.rglob("*.py"))
        if not any(path.is_relative_to(ROOT / room) for room in SILENT_ROOMS)
        for line, text in said_in(path).counted
        if text not in REFUSED_UNLESS_ONE
    ]
    assert not found, "use counted():\n" + "\n".join(found)


LOGGED = re.compile(
    r"(?<! of )%d (peers|members|steps|tokens|microbatches|pipelines|layers|spares)\b"
)


def test_what_is_counted_in_the_log_may_be_one() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, text in said_in(path).texts
        if LOGGED.search(text)
    ]
    assert not found, "use counted():\n" + "\n".join(found)
    assert LOGGED.search("agreed: %d members") and not LOGGED.search("%d of %d layers")


class Said(NamedTuple):
    """The texts that a module says, each with its line."""

    texts: tuple[tuple[int, str], ...]
    """The module's string literals and the literal parts of its f-strings, without docstrings."""
    counted: tuple[tuple[int, str], ...]
    """A number followed by a plural. "3 of {total} steps", "all {total} steps" and "{LIMIT} peers"
    are allowed, since a run has more than one step, and limits are above one."""


def said_in(path: Path) -> Said:
    return _said(path.read_text())


@cache
def _said(source: str) -> Said:
    """The texts of all modules, parsed once, since that takes seconds."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = tuple(
        (node.lineno, node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in docstrings
    )
    joined = (node for node in nodes if isinstance(node, ast.JoinedStr))
    return Said(texts, tuple(it for node in joined for it in _counted_by_hand(node)))


def _counted_by_hand(node: ast.JoinedStr) -> Iterator[tuple[int, str]]:
    before = ""
    for part, after in zip(node.values, node.values[1:], strict=False):
        if not isinstance(part, ast.FormattedValue):
            before = str(part.value)
            continue
        is_many = isinstance(after, ast.Constant) and MANY.match(str(after.value))
        is_limit = isinstance(part.value, ast.Name) and part.value.id.isupper()
        if is_many and not is_limit and not before.endswith((" of ", "all ")):
            yield node.lineno, str(after.value)


def test_the_searches_find_what_they_are_for(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        '"""5 MB."""\nsaid = f"{2} steps, {3} of {4} steps, {5 / 1e6} MB"\n'
        'also = f"all {6} steps of {LIMIT} peers and {7} training peers"\n'
    )
    assert [text for _, text in said_in(path).texts if OTHER_UNIT.search(text)] == [" MB"]
    assert [text for _, text in said_in(path).counted] == [" steps, ", " training peers"]
