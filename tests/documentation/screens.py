"""What a user sees for bad input, as docs/bad-input.md shows it: tests that provoke it compare.

With WRITE_SCREENS=1 in the environment the page is written anew instead.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from tests.documentation.pages import ROOT

PAGE = ROOT / "docs" / "bad-input.md"
WRITES = "WRITE_SCREENS"
_SCREEN = r"(^## {heading}\n.*?^```text\n)(.*?)(^```$)"
_DIFFERS = (
    (re.compile(r"\b12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\b"), "PEER"),
    (re.compile(r"/tcp/\d+"), "/tcp/PORT"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "12:00:00"),
    (re.compile(r"\b(?=\d*[a-f])[0-9a-f]{12,64}\b"), "DIGEST"),
    (re.compile(r"\bview \d+\b"), "view NUMBER"),
)


def screens() -> dict[str, str]:
    """The page's screens, by heading."""
    text = PAGE.read_text(encoding="utf-8")
    pattern = _SCREEN.replace("{heading}", r"[^\n]+")
    found = re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
    return {match[1].splitlines()[0].removeprefix("## "): match[2] for match in found}


def check_screen(
    heading: str, screen: str, home: Path, arguments: Sequence[str | Path] = ()
) -> None:
    """`screen` is what the page shows under that heading, below the command that was typed.

    What differs from case to case is named on the page: peers, ports, digests, times; `home` is the
    directory in which all happens.
    """
    typed = f"$ p2p-dtfm {' '.join(map(str, arguments))}\n" if arguments else ""
    shown = _same_everywhere(typed + screen.strip() + "\n", home)
    if os.environ.get(WRITES):
        _write(heading, shown)
    assert screens().get(heading) == shown, (
        f"{PAGE.name} shows something else under {heading!r}; {WRITES}=1 writes it anew"
    )


def _same_everywhere(text: str, home: Path) -> str:
    text = text.replace(str(home), "~")
    for pattern, name in _DIFFERS:
        text = pattern.sub(name, text)
    return text


def _write(heading: str, shown: str) -> None:
    pattern = _SCREEN.replace("{heading}", re.escape(heading))
    text, count = re.subn(
        pattern,
        lambda match: match[1] + shown + match[3],
        PAGE.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    assert count == 1, f"no heading {heading!r} with a screen"
    PAGE.write_text(text, encoding="utf-8")
