"""Names that benchmarks use still exist: between two runs of a benchmark nothing else reads
them."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _imported(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """The package's names that are imported: module, name there, and name here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("p2p_dtfm"):
            for name in node.names:
                yield node.module or "", name.name, name.asname or name.name


def _found(module: str, name: str) -> object | None:
    """A module, or a name in one."""
    held = importlib.import_module(module)
    if not hasattr(held, name):
        try:
            return importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            return None
    found: object = getattr(held, name)
    return found


def test_what_benchmarks_import_is_there() -> None:
    missing = [
        f"{path.name}: {module}.{name}"
        for path in sorted(BENCHMARKS.rglob("*.py"))
        for module, name, _ in _imported(ast.parse(path.read_text()))
        if _found(module, name) is None
    ]
    assert not missing


def test_what_benchmarks_replace_is_there() -> None:
    """A daemon that was to take another plan took the planner's: since planning has a port, nobody
    called the replaced function."""
    replaced, missing = 0, []
    for path in sorted(BENCHMARKS.rglob("*.py")):
        tree = ast.parse(path.read_text())
        held = {here: _found(module, name) for module, name, here in _imported(tree)}
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    owner = held.get(target.value.id)
                    replaced += owner is not None
                    if owner is not None and not hasattr(owner, target.attr):
                        missing.append(f"{path.name}: {target.value.id}.{target.attr}")
    assert replaced >= 4, "this test sees those of daemon_with_plan.py"
    assert not missing
