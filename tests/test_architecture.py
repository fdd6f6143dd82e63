"""The house keeps its shape: rooms of a size, no circles, imports that point down, short files.

`architecture.json` holds what is over a limit as yet: file or name, and how much. These numbers may
only fall. `python tests/test_architecture.py` writes down what is there now.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "p2p_dtfm"
KNOWN = Path(__file__).with_name("architecture.json")

FILES_IN_A_FOLDER = 15
LIMITS = {
    "lines of a file": 450,
    "depth of a class": 2,
    "arguments of a constructor": 7,
    "complexity of a function": 15,
    "complexity in core/consensus": 12,
    "attributes of an agreement class": 15,
    "asserts that something is not None in daemon": 5,
}
BRANCHES = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension,
    ast.match_case,
)  # fmt: skip


@cache
def trees() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py")))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """All of them, also those within functions and for type checkers."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & modules) or {node.module}
    return found & modules


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Modules that reach one another: strongly connected parts of more than one (Tarjan 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in number:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], number[other])
        if low[module] == number[module]:
            part = set(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(part) > 1 or module in graph[module]:
                found.append(part)

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return found


def complexity(function: ast.AST) -> int:
    """Ways through a function, as McCabe (1976) counts them; `and` and `or` count as branches."""
    ways = 1
    for node in _own_nodes(function):
        ways += isinstance(node, BRANCHES)
        ways += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
    return ways


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
            yield from _own_nodes(child)


def _arguments(function: ast.FunctionDef) -> int:
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1


def _is_not_none(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assert)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.ops[0], ast.IsNot)
        and isinstance(node.test.comparators[0], ast.Constant)
    )


def measured() -> dict[str, dict[str, int]]:
    """For each limit: what is measured, by name."""
    found: dict[str, dict[str, int]] = {name: {} for name in LIMITS}
    bases: dict[str, list[str]] = {}
    for path, tree in trees():
        place = path.relative_to(PACKAGE).as_posix()
        found["lines of a file"][place] = len(path.read_text().splitlines())
        for name, node in _named(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                if place.startswith("core/consensus/"):
                    count = len(_attributes(node))
                    found["attributes of an agreement class"][f"{place}: {name}"] = count
                continue
            kind = "in core/consensus" if place.startswith("core/consensus/") else "of a function"
            found[f"complexity {kind}"][f"{place}: {name}"] = complexity(node)
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                found["arguments of a constructor"][f"{place}: {name}"] = _arguments(node)
        if place.startswith("daemon/"):
            count = sum(map(_is_not_none, ast.walk(tree)))
            counts = found["asserts that something is not None in daemon"]
            counts["all"] = counts.get("all", 0) + count
    found["depth of a class"] = {name: _depth(name, bases) for name in bases}
    return found


def _named(tree: ast.AST, around: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{around}{node.name}"
            yield name, node
            yield from _named(node, f"{name}.")
        else:
            yield from _named(node, around)


def _attributes(node: ast.ClassDef) -> set[str]:
    """What its methods assign to `self`, and its fields."""
    found = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in ast.walk(node):
        if (
            isinstance(item, ast.Attribute)
            and isinstance(item.ctx, ast.Store)
            and isinstance(item.value, ast.Name)
            and item.value.id == "self"
        ):
            found.add(item.attr)
    return found


def _depth(name: str, bases: dict[str, list[str]]) -> int:
    """1 for a class with none of ours above it."""
    return 1 + max((_depth(base, bases) for base in bases[name] if base in bases), default=0)


@cache
def over_the_limit() -> dict[str, dict[str, int]]:
    return {
        limit: over
        for limit, counts in measured().items()
        if (over := {n: c for n, c in sorted(counts.items()) if c > LIMITS[limit]})
    }


def test_import_contracts_hold() -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_folder_is_seen_at_one_glance() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    counts = {f.relative_to(ROOT).as_posix(): len(list(f.glob("*.py"))) for f in folders}
    assert {f: n for f, n in counts.items() if n > FILES_IN_A_FOLDER} == {}


def test_every_folder_says_what_lives_there() -> None:
    silent = [
        folder.relative_to(ROOT).as_posix()
        for folder in {path.parent for path in PACKAGE.rglob("*.py")}
        if not (folder / "__init__.py").exists()
        or not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    ]
    assert silent == []


def test_no_circle_of_modules() -> None:
    modules = {module_of(path) for path, _ in trees()}
    graph = {module_of(path): imports_of(tree, modules) for path, tree in trees()}
    assert circles(graph) == []


def test_a_circle_would_be_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"e"}}
    assert circles(graph) == [{"a", "b", "c"}, {"e"}]


@pytest.mark.parametrize("limit", sorted(LIMITS))
def test_what_is_over_a_limit_only_falls(limit: str) -> None:
    known: dict[str, int] = json.loads(KNOWN.read_bytes()).get(limit, {})
    over = over_the_limit().get(limit, {})
    grown = {name: count for name, count in over.items() if count > known.get(name, 0)}
    assert grown == {}, f"{limit}: at most {LIMITS[limit]}, or what architecture.json says"
    assert sorted(set(known) - set(over)) == [], (
        "these are within the limit: take them off the list"
    )


def test_tests_import_no_benchmarks() -> None:
    """Those of benchmarks' own arithmetic stand with them; and no benchmark imports tests."""
    found = [
        path.relative_to(ROOT).as_posix()
        for folder, other in (("tests", "benchmarks"), ("benchmarks", "tests"))
        for path in sorted((ROOT / folder).rglob("*.py"))
        if any(_imported_roots(ast.parse(path.read_text()), {other}))
    ]
    assert found == []


def test_no_fake_takes_whatever_it_is_asked() -> None:
    """One that has any attribute would hide that what it stands for has lost one."""
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
    ]
    assert found == []


def _imported_roots(tree: ast.Module, wanted: set[str]) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from {node.module.partition(".")[0]} & wanted
        elif isinstance(node, ast.Import):
            yield from {alias.name.partition(".")[0] for alias in node.names} & wanted


if __name__ == "__main__":
    KNOWN.write_text(json.dumps(over_the_limit(), indent=2) + "\n")
