"""Which statements of the daemon a run of seeds has come to, and which never.

Counts what stands in functions: what a module does when it is imported shows nothing.
"""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import p2p_dtfm.daemon

ROOMS = ("trainer", "step", "state_transfer", "node")
_Statement = tuple[int, int]
"""The first and the last line of what is done there itself."""


@dataclass
class Room:
    """One folder of the daemon."""

    name: str
    all: int = 0
    reached: int = 0
    missed: dict[str, list[int]] | None = None
    """First lines, by file."""

    def __str__(self) -> str:
        return f"{self.name:16} {100 * self.reached / self.all:5.1f}% of {self.all} statements"


class Lines:
    """That were run, by file."""

    def __init__(self) -> None:
        self._folder = str(Path(p2p_dtfm.daemon.__file__).parent)
        self._lines: dict[str, set[int]] = {}
        self._wanted: dict[CodeType, bool] = {}

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        wanted = self._wanted.get(code)
        if wanted is None:
            wanted = self._wanted[code] = code.co_filename.startswith(self._folder)
        if not wanted:
            return None
        lines = self._lines.setdefault(code.co_filename, set())
        missing = {line for _, _, line in code.co_lines() if line} - lines
        if len(missing) <= 1:  # its first line is of no statement
            self._wanted[code] = False
            return None

        def line(frame: FrameType, event: str, argument: object) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def rooms(self) -> list[Room]:
        return [self._room(name) for name in ROOMS]

    def _room(self, name: str) -> Room:
        room = Room(name, missed={})
        for path in sorted(Path(self._folder, name).glob("*.py")):
            lines = self._lines.get(str(path), set())
            statements = list(_statements(ast.parse(path.read_text())))
            missed = [it[0] for it in statements if lines.isdisjoint(range(it[0], it[1] + 1))]
            room.all += len(statements)
            room.reached += len(statements) - len(missed)
            if missed and room.missed is not None:
                room.missed[f"{name}/{path.name}"] = missed
        return room


def _statements(tree: ast.AST, inside: bool = False) -> Iterator[_Statement]:
    """Of functions, and functions within them."""
    for child in ast.iter_child_nodes(tree):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if inside and isinstance(child, ast.stmt) and not is_function and not _is_silent(child):
            body = getattr(child, "body", None)
            last = body[0].lineno - 1 if body else child.end_lineno or child.lineno
            yield child.lineno, max(child.lineno, last)
        yield from _statements(child, inside or is_function)


def _is_silent(statement: ast.stmt) -> bool:
    """Docstrings, `...`, `pass` and names from outside, of which nothing is run."""
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Pass | ast.Nonlocal | ast.Global)


def told(lines: Lines) -> str:
    """For a terminal."""
    rooms = lines.rooms()
    reached, count = sum(room.reached for room in rooms), sum(room.all for room in rooms)
    text = [f"daemon/{room}" for room in rooms]
    text.append(f"together {100 * reached / count:.1f}% of {count} statements; never came to:")
    for room in rooms:
        for file, missed in (room.missed or {}).items():
            text.append(f"  {file}: {', '.join(map(str, missed))}")
    return "\n".join(text)
