"""The headings of docs/troubleshooting.md are error messages: which of them fits a message."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.documentation.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
_PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b")
_WILD = "\0"


def headings() -> list[str]:
    """The headings in order, without those under the page's own first-level headings."""
    return re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def heading_of(message: str) -> str | None:
    """The heading that a user who reads this message finds."""
    flat = " ".join(message.split())
    for heading in headings():
        if re.match(_pattern(_PLACEHOLDER.sub(_WILD, heading)), flat):
            return heading
    return None


def is_raised(heading: str, templates: list[str]) -> bool:
    """Whether some code raises a message that this heading is an example of."""
    return any(re.match(_pattern(template) + "$", heading) for template in templates)


@cache
def templates(*folders: str) -> list[str]:
    """The causes of all `UserError`s in these packages, with `_WILD` for filled-in values. They are
    read once."""
    paths = [path for folder in folders for path in (ROOT / "p2p_dtfm" / folder).rglob("*.py")]
    return [template for path in sorted(paths) for template in _templates(path)]


def readable(template: str) -> str:
    return template.replace(_WILD, "…")


_RAISED = ("UserError", "DeviceFault", "P2pdLost")
_SAYS_ITSELF = (
    "AnotherRun",
    "NoTextField",
    "NobodyTrains",
    "OtherProtocol",
    "RunComplete",
    "ShardUnreadable",
)
"""Classes whose own text becomes an error's text."""


def _templates(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    if not any(name in source for name in (*_RAISED, *_SAYS_ITSELF)):
        return  # to parse all takes seconds
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if _name(node) in _RAISED]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in _SAYS_ITSELF:
            calls += [inner for inner in ast.walk(node) if _name(inner) == "__init__"]
    for call in calls:
        assert isinstance(call, ast.Call)
        text = _text(call.args[0])
        if text.strip(_WILD + ":; \n"):
            yield " ".join(text.split())


def _name(node: ast.AST) -> str:
    """The name of what is called."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return _WILD


def _pattern(text: str) -> str:
    return ".+".join(map(re.escape, re.split(f"{_WILD}+", text)))
