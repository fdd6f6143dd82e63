"""A reader who meets a word of ours for the first time finds the way to its meaning."""

import re

import pytest

from tests.documentation.pages import ROOT, pages

WORDS = re.compile(r"\b(views?|snapshots?|guardians?|spares?|microbatch(es)?)\b", re.IGNORECASE)
EXPLAINED = {
    *("audit", "bar", "checkpoint", "colluder", "digest", "established", "fellow", "goodput"),
    *("guardian", "held-out loss", "in flight", "microbatch", "nats", "replica", "shard"),
    *("snapshot", "spare", "syncing", "transcript", "view"),
}
READ_FROM_THE_TOP = [
    page for page in pages() if page.count("/") < 2 and page != "docs/glossary.md"
]  # fmt: skip
"""Benchmarks and decisions are for readers who come from these pages."""


def first_paragraph_with(pattern: re.Pattern[str], text: str) -> int | None:
    paragraphs = enumerate(re.split(r"\n\s*\n", text))
    return next((number for number, each in paragraphs if pattern.search(each)), None)


@pytest.mark.parametrize("page", READ_FROM_THE_TOP)
def test_a_page_links_the_words_where_it_first_uses_one(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    used = first_paragraph_with(WORDS, text)
    linked = first_paragraph_with(re.compile(r"\]\((docs/)?glossary\.md\)"), text)
    if used is not None:
        assert linked is not None and linked <= used


def test_the_words_of_the_screens_are_explained_and_in_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.MULTILINE)
    assert set(words) >= EXPLAINED
    assert words == sorted(words, key=str.lower)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[([\w-]+\.md)\]\(\1\): ", index, re.MULTILINE)
    there = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(there), "once each"


@pytest.mark.parametrize("page", pages())
def test_what_a_page_links_is_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target, _, part in re.findall(r"\]\((?!https?:)([^)#\s]*)(#([\w-]+))?\)", text):
        linked = (ROOT / page).parent / target if target else ROOT / page
        assert linked.exists(), f"{page}: {target}"
        if part:
            assert part in anchors(linked.read_text(encoding="utf-8")), f"{page}: {target}#{part}"


def anchors(text: str) -> set[str]:
    """The anchors of headings: small letters, no punctuation, dashes for spaces."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
