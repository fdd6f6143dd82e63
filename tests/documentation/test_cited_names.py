"""Files and names that documents and docstrings cite exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda page: page.as_posix()
)
PACKAGE = ROOT / "p2p_dtfm"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_")
FILE = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|c|toml|md|js|json|svg|png)")
FOLDER = re.compile(rf"(?:{'|'.join(ROOMS)}|docs|tests|benchmarks|configs|bootstrap)/(?:[\w-]+/)*")
DOTTED = re.compile(rf"(?:p2p_dtfm\.)?((?:{'|'.join(ROOMS)})(?:\.\w+)+)")
OF_A_CLASS = re.compile(r"([A-Z]\w+)\.([a-z_]\w+)(?:\(\))?")
IDENTIFIER = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)+|[a-z]+(?:_[a-z0-9]+)+")

WRITTEN_AT_RUN_TIME = re.compile(
    r"(events|status|manifest|summary|trace|shape|case|chaos|run|tokenizer|config|model|verdict"
    r"|tokenizer_config|adapter_config|generation_config|special_tokens_map|result|baseline|plan|daemon|dataset_info"
    r"|before|after|bars|my-\w+|data_info|state|initial|guests)\.(json|md|toml)"
)
ELSEWHERE = {
    "datasets.save_to_disk", "key_file", "systemd_analyze", "tc_netem", "save_to_disk",
}  # fmt: skip
"""Names of other programs."""


def cited(page: Path) -> list[str]:
    """The words in backticks, outside of blocks."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [match.strip() for match in re.findall(r"`([^`]+)`", text)]


def everything() -> str:
    """All words of code and configuration."""
    files = [
        path
        for folder in ("p2p_dtfm", "benchmarks", "tests", "configs", "bootstrap")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".toml", ".c", ".js", ".service", ".html"}
        and "vendor" not in path.parts
        and path != Path(__file__)
    ]
    return "\n".join(path.read_text() for path in [*files, ROOT / "pyproject.toml"])


@cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", everything()))


@cache
def file_names() -> frozenset[str]:
    """All file names but those of an environment, which has a hundred thousand."""
    top = [path for path in ROOT.iterdir() if path.name != ".venv"]
    return frozenset(path.name for each in top for path in (each, *each.rglob("*.*")))


def is_there(word: str, page: Path) -> bool:
    """Whether the thing that `word` names exists, if it looks like a name of ours."""
    if FILE.fullmatch(word):
        return _is_file(word, page)
    if FOLDER.fullmatch(word):
        return (ROOT / word).is_dir() or (PACKAGE / word).is_dir()
    if match := DOTTED.fullmatch(word):
        return _is_module_or_name(match[1].split("."))
    if match := OF_A_CLASS.fullmatch(word):
        return match[1] in words() and match[2] in words()
    if IDENTIFIER.fullmatch(word):
        return word in words() or word in ELSEWHERE
    return True


def _is_file(word: str, page: Path) -> bool:
    if "/" not in word:
        return word in file_names() or WRITTEN_AT_RUN_TIME.fullmatch(word) is not None
    if any((place / word).exists() for place in (ROOT, PACKAGE, page.parent)):
        return True
    return word.partition("/")[0] not in (*ROOMS, "docs", "tests", "benchmarks", "p2p_dtfm")


def _is_module_or_name(parts: list[str]) -> bool:
    for count in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:count])
        if path.is_dir() and count == len(parts):
            return True
        file = path.with_suffix(".py")
        if file.exists():
            rest = parts[count:]
            return not rest or _defines(file.read_text(), rest)
    return False


def _defines(source: str, names: list[str]) -> bool:
    return all(
        re.search(rf"(class |def |\b(self\.)?){re.escape(name)}\b", source) is not None
        for name in names
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_cites_is_there(page: Path) -> None:
    missing = sorted({word for word in cited(page) if not is_there(word, page)})
    assert missing == []


def test_what_a_docstring_cites_is_there() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in docstrings(ast.parse(path.read_text()))
        for word in re.findall(r"`([^`]+)`", text)
        if not is_there(word, path)
    ]
    assert missing == []


def docstrings(tree: ast.Module) -> Iterator[str]:
    """All docstrings, those of fields and constants as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(value := node.value, ast.Constant):
            yield from [value.value] if isinstance(value.value, str) else []


def test_what_is_not_there_is_found() -> None:
    page = ROOT / "README.md"
    for word in ("core/no_such.py", "no_such_file.py", "core.no_such.Thing", "NoSuchClass.method"):
        assert not is_there(word, page), word
