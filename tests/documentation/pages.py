"""What the documentation tells users to type: the fenced blocks of its pages."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(sh|console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str

    def commands(self) -> list[list[str]]:
        """The words of each line of a shell block. Of a console block, the words of lines after "$
        "."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        split = [shlex.split(line, comments=True) for line in lines]
        return [words for words in split if words]


def blocks_of(page: str) -> list[Block]:
    """The shell and Python blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(language, body) for language, body in _BLOCK.findall(text)]


_UNSEEN = re.compile(
    r"^ {4}(?P<indented>\S+)|^```\n(?P<unlabelled>\S+)(?=.*?^```$)", re.MULTILINE | re.DOTALL
)
_COMMAND = re.compile(
    r"\$|(\S*/)?(p2p-dtfm|pipx?|python3?|make|podman|docker|git|cp|mv|rm|sed|sudo|systemctl|env)"
)


def unseen_commands(page: str) -> list[str]:
    """First words of blocks that are commands, and that no fence marks as such."""
    text = (ROOT / page).read_text(encoding="utf-8")
    labelled = re.sub(r"^```\w+\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [match["indented"] or match["unlabelled"] for match in _UNSEEN.finditer(labelled)]
    return [word for word in found if _COMMAND.fullmatch(word)]


def mentioned(page: str) -> list[list[str]]:
    """The words of each command that the running text of a page mentions: `p2p-dtfm ...`,
    `--option`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    running = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", running))
    return [span.split() for span in spans if re.match(r"p2p-dtfm |--[a-z]", span)]


def pages() -> list[str]:
    """README and all pages under docs/, as paths from the root."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]
