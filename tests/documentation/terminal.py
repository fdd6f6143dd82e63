"""A command in a terminal of its own, and what that terminal shows: the parts of a terminal that
the program uses."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

COLUMNS, LINES = 100, 34
HISTORY_LIMIT = 2000
WORDS = (
    "A view is who takes part, and the plan that they agree on: a new one opens whenever somebody "
    "comes or goes.\nGuardians keep copies of layers that others train, for when those fall silent "
    "([all words](glossary.md)).\n"
)
"""The words before the first screen of a page of screens."""
_PIECE = re.compile(
    r"\x1b\[(\?)?([\d;]*)([A-Za-z])|\x1b[\]P].*?(?:\x07|\x1b\\)|\x1b[^\[\]P]|.", re.DOTALL
)
_UNFINISHED = re.compile(r"\x1b(?:\[[\d;?]*)?\Z")


class Screen:
    """Characters in lines and columns, and the lines that have gone out at the top."""

    def __init__(self, columns: int = COLUMNS, lines: int = LINES) -> None:
        self.columns, self.lines = columns, lines
        self._past: list[str] = []
        self._rows = [[" "] * columns for _ in range(lines)]
        self._row = self._column = 0
        self._rest = ""

    def text(self) -> str:
        shown = ["".join(row).rstrip() for row in self._rows]
        return "\n".join([*self._past, *shown]).rstrip()

    def feed(self, text: str) -> None:
        text = self._rest + text
        unfinished = _UNFINISHED.search(text)
        self._rest = unfinished[0] if unfinished else ""
        for piece in _PIECE.finditer(text[: len(text) - len(self._rest)]):
            if piece[3]:
                self._order(piece[3], piece[2])
            elif len(piece[0]) == 1:
                self._write(piece[0])

    def _write(self, letter: str) -> None:
        if letter == "\n":
            self._down()
        elif letter == "\r":
            self._column = 0
        elif letter == "\b":
            self._column = max(0, self._column - 1)
        elif letter == "\t":
            self._column = min(self.columns - 1, self._column // 8 * 8 + 8)
        elif letter >= " ":
            if self._column == self.columns:  # the next letter wraps, not the last one
                self._column = 0
                self._down()
            self._rows[self._row][self._column] = letter
            self._column += 1

    def _down(self) -> None:
        if self._row < self.lines - 1:
            self._row += 1
            return
        self._past = [*self._past, "".join(self._rows.pop(0)).rstrip()][-HISTORY_LIMIT:]
        self._rows.append([" "] * self.columns)

    def _order(self, what: str, numbers: str) -> None:
        given = [int(number or 0) for number in numbers.split(";")]
        count = max(1, given[0])
        if what == "A":
            self._row = max(0, self._row - count)
        elif what == "B":
            self._row = min(self.lines - 1, self._row + count)
        elif what == "C":
            self._column = min(self.columns - 1, self._column + count)
        elif what == "D":
            self._column = max(0, self._column - count)
        elif what == "G":
            self._column = count - 1
        elif what == "H":
            self._row, self._column = count - 1, max(1, *given[1:], 1) - 1
        elif what in "JK":
            self._clear(what == "J", given[0])

    def _clear(self, below: bool, how: int) -> None:
        """Clear from here on, up to here, or all: of the line, or of the screen."""
        row = self._rows[self._row]
        for column in range(self.columns):
            if how == 2 or (column >= self._column if how == 0 else column <= self._column):
                row[column] = " "
        others = range(self.lines) if below else ()
        for number in others:
            if how == 2 or (number > self._row if how == 0 else number < self._row):
                self._rows[number] = [" "] * self.columns


class Terminal:
    """A terminal in which a command runs. A context manager: at its end the command has ended."""

    def __init__(
        self, command: Sequence[str], directory: Path, environment: Mapping[str, str]
    ) -> None:
        self._screen = Screen()
        self._keys, theirs = pty.openpty()
        size = struct.pack("HHHH", self._screen.lines, self._screen.columns, 0, 0)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
        self._began_s = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env={"TERM": "xterm-256color", "LANG": "C.UTF-8", **environment},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=_lead_the_terminal,  # so that Ctrl-C reaches it
        )
        os.close(theirs)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with contextlib.suppress(OSError):  # the program has ended
            while data := os.read(self._keys, 1 << 16):
                self._screen.feed(decoder.decode(data))

    def text(self) -> str:
        return self._screen.text()

    def wait_for(self, pattern: str, limit_s: float) -> float:
        """Seconds from the start of the command until the screen showed `pattern`."""
        while not re.search(pattern, self.text()):
            elapsed_s = time.monotonic() - self._began_s
            ended = self.process.poll() is not None
            assert elapsed_s < limit_s and not ended, f"no {pattern!r} yet:\n{self.text()}"
            time.sleep(0.05)
        return time.monotonic() - self._began_s

    def press_ctrl_c(self) -> None:
        os.write(self._keys, b"\x03")

    def wait_for_end(self, limit_s: float) -> float:
        """Seconds from the start of the command. By then all its output is on the screen."""
        self.process.wait(limit_s)
        elapsed_s = time.monotonic() - self._began_s
        self._reading.join(5.0)
        return elapsed_s


def _lead_the_terminal() -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who runs in the background ignores it
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Story:
    """A page of screens in the order in which they were seen, with the time of each."""

    def __init__(self, title: str, said: str, hidden: Mapping[str, str]) -> None:
        """`hidden`: the names that stand on the page in place of directories and lines."""
        self._title, self._said, self._hidden = title, said, dict(hidden)
        self._began_s = time.monotonic()
        self._steps: list[tuple[float, str, str]] = []
        self._screens = ""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def hide(self, text: str, name: str) -> None:
        self._hidden[text] = name

    def add(self, title: str, command: str, said: str, screen: str) -> None:
        shown = f"$ {command}\n{screen}"
        for text, name in self._hidden.items():
            shown, command = _replaced(shown, text, name), _replaced(command, text, name)
        shown = re.sub(r"#token=[\w-]+", "#token=...", shown)
        self._screens += f"\n## {title}\n\n{said}\n\n```text\n{shown.rstrip()}\n```\n"
        self._steps.append((self.elapsed_s, title, command))

    def picture(self, title: str, said: str, path: Path, place: Path) -> None:
        """Add a picture that lies at `path`, on a page in the directory `place`."""
        shown = path.relative_to(place).as_posix()
        self._screens += f"\n## {title}\n\n{said}\n\n![{title}]({shown})\n"
        self._steps.append((self.elapsed_s, title, "p2p-dtfm dashboard"))

    def text(self) -> str:
        rows = [
            f"| {int(at_s) // 60}:{int(at_s) % 60:02} | {title} | `{command}` |"
            for at_s, title, command in self._steps
        ]
        table = "| minute | what was reached | by typing |\n|---|---|---|\n" + "\n".join(rows)
        return f"# {self._title}\n\n{self._said}\n\n{WORDS}\n{table}\n{self._screens}"


def _replaced(shown: str, text: str, name: str) -> str:
    """Replace it also where the terminal has broken it into lines."""
    return re.sub(r"\n?".join(map(re.escape, text)), lambda _: name, shown)
