"""Which of the daemon's statements a run of seeds has reached, and which never.

Only statements in functions count: what a module does when it is imported shows nothing. Meanwhile
functions of `ROOMS` have other code, which notes each statement before it runs. That costs a seed
nearly nothing; a trace of lines takes several times as long as the seed.
"""

import ast
import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import p2p_dtfm.daemon

ROOMS = ("trainer", "step", "state_transfer", "node")
NOTES = "_REACHED"
"""The name in each module of the notes of its statements."""
_Key = tuple[str, str, int]
"""A function's file, its qualified name, and its first line."""


@dataclass
class Room:
    """One folder of the daemon."""

    name: str
    all: int = 0
    reached: int = 0
    missed: dict[str, list[int]] | None = None
    """Statements that were never reached, by file: their first lines."""

    def __str__(self) -> str:
        return f"{self.name:16} {100 * self.reached / self.all:5.1f}% of {self.all} statements"


@dataclass
class _Module:
    """One file, with the code that notes what is reached."""

    module: ModuleType
    lines: list[int]
    """Each statement's first line."""
    reached: bytearray
    """1 where the statement at that place was reached."""
    codes: dict[_Key, CodeType]


class LinesReached:
    """The lines that were run, by file."""

    def __init__(self) -> None:
        self._rooms = {room: [_noting(name) for name in _modules(room)] for room in ROOMS}

    @contextmanager
    def watched(self) -> Iterator[None]:
        modules = [module for room in self._rooms.values() for module in room]
        codes = {key: code for module in modules for key, code in module.codes.items()}
        before = dict[FunctionType, CodeType]()
        for module in modules:
            setattr(module.module, NOTES, module.reached)
        for function in _functions():
            if (code := codes.get(_key(function.__code__))) is not None:
                before[function] = function.__code__
                function.__code__ = code
        try:
            yield
        finally:
            for function, code in before.items():
                function.__code__ = code

    def rooms(self) -> list[Room]:
        return [self._room(name) for name in ROOMS]

    def _room(self, name: str) -> Room:
        room = Room(name, missed={})
        for module in self._rooms[name]:
            pairs = zip(module.lines, module.reached, strict=True)
            missed = [line for line, is_reached in pairs if not is_reached]
            room.all += len(module.lines)
            room.reached += len(module.lines) - len(missed)
            if missed and room.missed is not None:
                file = _file(module.module).relative_to(_daemon_folder())
                room.missed[str(file)] = missed
        return room


def _functions() -> list[FunctionType]:
    """All functions, also those that somebody has set aside for good (`gc.freeze`)."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    found = [it for it in gc.get_objects() if type(it) is FunctionType]
    if is_frozen:
        gc.freeze()
    return found


def _modules(room: str) -> list[str]:
    """The room's modules, also those in its inner rooms."""
    folder = _daemon_folder()
    files = sorted(folder.joinpath(room).rglob("*.py"))
    names = [file.relative_to(folder).with_suffix("").parts for file in files]
    return [".".join((p2p_dtfm.daemon.__name__, *parts)) for parts in names]


def _daemon_folder() -> Path:
    return Path(p2p_dtfm.daemon.__file__).parent


def _file(module: ModuleType) -> Path:
    assert module.__file__ is not None
    return Path(module.__file__)


def _noting(name: str) -> _Module:
    module = importlib.import_module(name)
    file = _file(module)
    tree = ast.parse(file.read_text())
    notes = _AddNotes()
    notes.visit(tree)
    code = compile(ast.fix_missing_locations(tree), str(file), "exec", dont_inherit=True)
    codes = {_key(each): each for each in _codes_in(code)}
    return _Module(module, notes.lines, bytearray(len(notes.lines)), codes)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """All code within, without lambdas: these have no statements, and one line may have two."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_name != "<lambda>":
                yield inner
            yield from _codes_in(inner)


def _key(code: CodeType) -> _Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno


class _AddNotes(ast.NodeVisitor):
    """Puts a note before each statement in functions, and in functions within functions."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self._depth = 0
        """How many functions are around."""

    def generic_visit(self, node: ast.AST) -> None:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        self._depth += is_function
        for name, value in ast.iter_fields(node):
            if self._depth and isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, [each for item in value for each in self._noted(item)])
            elif isinstance(value, list):
                self._visit_all(value)
            elif isinstance(value, ast.AST):
                self.visit(value)
        self._depth -= is_function

    def _visit_all(self, items: list[object]) -> None:
        for item in items:
            if isinstance(item, ast.AST):
                self.visit(item)

    def _noted(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        if not is_function and not _is_silent(statement):
            note = ast.parse(f"{NOTES}[{len(self.lines)}] = 1").body[0]
            for part in ast.walk(note):
                ast.copy_location(part, statement)
            self.lines.append(statement.lineno)
            yield note
        self.visit(statement)
        yield statement


def _is_silent(statement: ast.stmt) -> bool:
    """Docstrings, `...`, `pass` and names from outside run nothing."""
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Pass | ast.Nonlocal | ast.Global)


def told(lines: LinesReached) -> str:
    """A report for a terminal."""
    rooms = lines.rooms()
    reached, count = sum(room.reached for room in rooms), sum(room.all for room in rooms)
    text = [f"daemon/{room}" for room in rooms]
    text.append(f"together {100 * reached / count:.1f}% of {count} statements; never came to:")
    for room in rooms:
        for file, missed in (room.missed or {}).items():
            text.append(f"  {file}: {', '.join(map(str, missed))}")
    return "\n".join(text)
