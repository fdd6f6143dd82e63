"""The house keeps its shape: rooms of a size, no circles, imports that point down, short files.

`architecture.json` holds what is over a limit as yet: file or name, and how much. These numbers may
only fall. `python tests/test_architecture.py` writes down what is there now.
"""

import ast
import gc
import json
import re
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
    "required fields of a class that does something": 7,
    "required fields of what a constructor is given": 7,
    "complexity of a function": 15,
    "complexity in core/consensus": 12,
    "attributes of an agreement class": 15,
    "asserts that something is not None in daemon": 2,
    "classes of one name": 1,
}
BRANCHES = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension,
    ast.match_case,
)  # fmt: skip

QUESTION = re.compile(r"_*(is|has|may|was|are)_")
"""How names of predicates begin."""


@cache
def trees() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py")))


@pytest.fixture(scope="module", autouse=True)
def no_trees_stay() -> Iterator[None]:
    """Drop the trees at the end: collections among later tests would look through their millions of
    objects. While the trees grow, nothing of them is to be collected."""
    gc.disable()
    yield
    trees.cache_clear()
    gc.enable()


@cache
def other_sources() -> tuple[Path, ...]:
    """Sources in C and in JavaScript that are ours."""
    found = (path for kind in ("c", "js") for path in PACKAGE.rglob(f"*.{kind}"))
    return tuple(sorted(path for path in found if "vendor" not in path.parts))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """All imports, also those within functions and for type checkers."""
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


def _asserted_not_none(node: ast.AST) -> int:
    """How many things an assert says not to be None, alone or joined by `and`."""
    if not isinstance(node, ast.Assert):
        return 0
    parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    return sum(
        isinstance(part, ast.Compare)
        and isinstance(part.ops[0], ast.IsNot)
        and isinstance(part.comparators[0], ast.Constant)
        for part in parts
    )


def _name_of(node: ast.AST) -> str:
    """The name of what is called, or of a thing itself, without its module."""
    if isinstance(node, ast.Call):
        return _name_of(node.func)
    return getattr(node, "id", getattr(node, "attr", ""))


def _required_fields(node: ast.ClassDef) -> int:
    """The number of required fields of a dataclass, whose constructor nobody has written. 0 for any
    other class."""
    if not any(_name_of(decorator) == "dataclass" for decorator in node.decorator_list):
        return 0
    return sum(
        isinstance(item, ast.AnnAssign)
        and "ClassVar" not in ast.unparse(item.annotation)
        and not _has_default(item.value)
        for item in node.body
    )


def _has_default(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and _name_of(value) == "field":
        return bool({"default", "default_factory", "init"} & {it.arg for it in value.keywords})
    return value is not None


def _does_something(node: ast.ClassDef) -> bool:
    """Whether the class does more than tell what follows from its fields, and come to be."""
    return any(
        isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        and not item.name.startswith("__")
        and not {"property", "cached_property", "classmethod", "staticmethod"}
        & {_name_of(decorator) for decorator in item.decorator_list}
        for item in node.body
    )


def _given_to_constructors(tree: ast.Module) -> set[str]:
    """Names of types of the arguments of each `__init__`, without their modules."""
    return {
        _name_of(part)
        for _, node in _named(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        for given in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if given.annotation is not None
        for part in ast.walk(given.annotation)
        if isinstance(part, ast.Name | ast.Attribute)
    }


def measured() -> dict[str, dict[str, int]]:
    """The measured numbers of each limit, by name."""
    found: dict[str, dict[str, int]] = {name: {} for name in LIMITS}
    for path in other_sources():
        place = path.relative_to(PACKAGE).as_posix()
        found["lines of a file"][place] = len(path.read_text().splitlines())
    given = set().union(*(_given_to_constructors(tree) for _, tree in trees()))
    for path, tree in trees():
        place = path.relative_to(PACKAGE).as_posix()
        found["lines of a file"][place] = len(path.read_text().splitlines())
        for name, node in _named(tree):
            if isinstance(node, ast.ClassDef):
                alike = found["classes of one name"]
                alike[node.name] = alike.get(node.name, 0) + 1
                _measure_class(node, f"{place}: {name}", given, found)
                continue
            kind = "in core/consensus" if place.startswith("core/consensus/") else "of a function"
            found[f"complexity {kind}"][f"{place}: {name}"] = complexity(node)
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                found["arguments of a constructor"][f"{place}: {name}"] = _arguments(node)
        if place.startswith("daemon/"):
            counts = found["asserts that something is not None in daemon"]
            asserted = sum(map(_asserted_not_none, ast.walk(tree)))
            counts["all"] = counts.get("all", 0) + asserted
    bases = bases_of(trees())
    found["depth of a class"] = {name: _depth(name, bases) for name in bases}
    return found


def _measure_class(
    node: ast.ClassDef, name: str, given: set[str], found: dict[str, dict[str, int]]
) -> None:
    if name.startswith("core/consensus/"):
        found["attributes of an agreement class"][name] = len(_attributes(node))
    fields = _required_fields(node)
    if _does_something(node):
        found["required fields of a class that does something"][name] = fields
    if node.name in given:
        found["required fields of what a constructor is given"][name] = fields


def bases_of(sources: Iterable[tuple[Path, ast.Module]]) -> dict[str, list[str]]:
    """The bases of each class, as far as they are ours; both by file and name."""
    files = {module_of(path): path.relative_to(PACKAGE).as_posix() for path, _ in sources}
    found: dict[str, list[str]] = {}
    for path, tree in sources:
        place = path.relative_to(PACKAGE).as_posix()
        classes = {n: node for n, node in _named(tree) if isinstance(node, ast.ClassDef)}
        known = {name.rpartition(".")[2]: f"{place}: {name}" for name in classes}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in files:
                for alias in node.names:
                    known[alias.asname or alias.name] = f"{files[node.module]}: {alias.name}"
        for name, node in classes.items():
            bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
            ours = (known.get(base.id) for base in bases if isinstance(base, ast.Name))
            found[f"{place}: {name}"] = [base for base in ours if base is not None]
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
    """The attributes that its methods assign to `self`, and its fields."""
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
    """The depth of a class: 1 with none of ours above it."""
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


def test_what_is_named_like_a_question_says_yes_or_no() -> None:
    """Or None where nobody can tell. A reader of `is_heard` assumes that it changes nothing."""
    found = [
        f"{path.relative_to(PACKAGE).as_posix()}: {name}"
        for path, tree in trees()
        for name, node in _named(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and QUESTION.match(node.name)
        if node.returns is None or ast.unparse(node.returns) not in ("bool", "bool | None")
    ]
    assert found == []


def test_what_would_escape_is_measured() -> None:
    asserts = ast.parse("assert a is not None and b is not None and c\nassert d is not None\n")
    assert sum(map(_asserted_not_none, ast.walk(asserts))) == 3
    classes = ast.parse(
        "@dataclass(frozen=True)\nclass Wide:\n"
        "  a: int\n  b: int\n  c: int = 0\n  d: list[int] = field(default_factory=list)\n"
        "  e: ClassVar[int]\n  f: int = field(repr=False)\n"
        "  @property\n  def told(self): ...\n"
    )
    (wide,) = classes.body
    assert isinstance(wide, ast.ClassDef)
    assert _required_fields(wide) == 3 and not _does_something(wide)
    twins = {
        PACKAGE / "core/one.py": "class Base: ...\nclass Twin(Base): ...\n",
        PACKAGE / "core/two.py": "from p2p_dtfm.core.one import Twin as T\nclass Twin(T): ...\n",
    }
    bases = bases_of([(path, ast.parse(text)) for path, text in twins.items()])
    assert {name: _depth(name, bases) for name in bases} == {
        "core/one.py: Base": 1,
        "core/one.py: Twin": 2,
        "core/two.py: Twin": 3,
    }
    assert {path.suffix for path in other_sources()} == {".c", ".js"}


def test_tests_import_no_benchmarks() -> None:
    """Tests of benchmarks' own arithmetic stand with the benchmarks, and no benchmark imports
    tests."""
    found = [
        path.relative_to(ROOT).as_posix()
        for folder, other in (("tests", "benchmarks"), ("benchmarks", "tests"))
        for path in sorted((ROOT / folder).rglob("*.py"))
        if other in (source := path.read_text())
        if any(_imported_roots(ast.parse(source), {other}))
    ]
    assert found == []


def test_no_fake_takes_whatever_it_is_asked() -> None:
    """A fake with any attribute would hide that the real thing has lost one."""
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if "__getattr__" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
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
