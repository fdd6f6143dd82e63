"""A newcomer's first minutes, by what README says alone: timed, and with what was on screen.

    python benchmarks/first_minutes.py --out docs/first-five-minutes.md

clones this repository into a new directory, with an empty home, types README's commands into a
terminal of its own, and writes a page. It installs everything anew, over the network. Needs pyte
(`pip install pyte`), a terminal that can be read.
"""

import argparse
import contextlib
import datetime
import fcntl
import os
import platform
import pty
import re
import struct
import subprocess
import tempfile
import termios
import threading
import time
from pathlib import Path

import psutil
import pyte

ROOT = Path(__file__).parents[1]
COLUMNS, LINES = 100, 34
INSTALL_S, DEMO_S, COMMAND_S = 3600.0, 1800.0, 600.0
KEPT = ("PATH", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


class Terminal:
    """A command in a terminal, and what that shows."""

    def __init__(self, command: str, directory: Path, home: Path) -> None:
        self._screen = pyte.HistoryScreen(COLUMNS, LINES, history=2000)
        stream = pyte.ByteStream(self._screen)
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        kept = {n: v for n, v in os.environ.items() if n in KEPT or n.startswith("PIP_")}
        self._began_s = time.monotonic()
        self.process = subprocess.Popen(
            command,
            shell=True,
            cwd=directory,
            env={**kept, "HOME": str(home), "TERM": "xterm-256color", "LANG": "C.UTF-8"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

        def read() -> None:
            with contextlib.suppress(OSError):  # the program has ended
                while data := os.read(ours, 1 << 16):
                    stream.feed(data)

        threading.Thread(target=read, daemon=True).start()

    def text(self) -> str:
        past = [
            "".join(line[at].data for at in range(COLUMNS)) for line in self._screen.history.top
        ]
        return "\n".join(line.rstrip() for line in [*past, *self._screen.display]).rstrip()

    def wait_for(self, pattern: str, limit_s: float) -> float:
        """Seconds from the start of the command until the screen showed that."""
        while not re.search(pattern, self.text()):
            elapsed_s = time.monotonic() - self._began_s
            if elapsed_s > limit_s or self.process.poll() is not None:
                raise SystemExit(f"no {pattern!r} after {elapsed_s:.0f} s:\n{self.text()}")
            time.sleep(0.1)
        return time.monotonic() - self._began_s

    def wait_for_end(self, limit_s: float) -> float:
        self.process.wait(limit_s)
        elapsed_s = time.monotonic() - self._began_s
        time.sleep(0.3)  # for what is still in the terminal
        return elapsed_s


class Page:
    def __init__(self, directory: Path, home: Path) -> None:
        self._hidden = {str(directory): "~/p2p-dtfm", str(home): "~"}
        processors, memory_gib = psutil.cpu_count(), psutil.virtual_memory().total / (1 << 30)
        today = datetime.date.today().isoformat()
        self.text = (
            "# A newcomer's first minutes\n\n"
            "What README says, typed into a fresh clone with an empty home: how long each step "
            "took, and\nwhat was on screen. Written by `benchmarks/first_minutes.py` on "
            f"{today}, on a machine with\n{processors} processor cores and {memory_gib:.0f} GiB of "
            f"memory ({platform.system()}, Python {platform.python_version()}); its load average "
            f"was\n{os.getloadavg()[0]:.1f} when it began.\n"
        )

    def add(self, title: str, command: str, said: str, screen: str) -> None:
        for path, name in self._hidden.items():
            screen = screen.replace(path, name)
        screen = re.sub(r"#token=[\w-]+", "#token=...", screen)
        self.text += f"\n## {title}\n\n{said}\n\n```text\n$ {command}\n{screen}\n```\n"
        print(f"{title}: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary) / "home"
        home.mkdir()
        directory = Path(temporary) / "p2p-dtfm"
        page = Page(directory, home)
        began_s = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", ROOT, directory], check=True)
        _demo(page, directory, home, time.monotonic() - began_s)
        _found(page, directory, home)
        out.write_text(page.text, encoding="utf-8")


def _demo(page: Page, directory: Path, home: Path, cloned_s: float) -> None:
    demo = Terminal("make demo", directory, home)
    installed_s = demo.wait_for(r"dashboard|step \d+/", INSTALL_S)
    trained_s = demo.wait_for(r"step [1-9]\d*/", INSTALL_S)
    said = (
        f"The clone took {cloned_s:.0f} s, the installation {installed_s:.0f} s; the first steps "
        f"were committed\n{trained_s - installed_s:.0f} s later."
    )
    page.add("Install, and see it train", "make demo", said, demo.text())
    ended_s = demo.wait_for_end(DEMO_S)
    said = f"The demo ended by itself {ended_s - installed_s:.0f} s after the installation."
    page.add("The end of the demo", "make demo", said, demo.text())


def _found(page: Page, directory: Path, home: Path) -> None:
    program = ".venv/bin/p2p-dtfm"
    command = f"{program} --run configs/tiny.toml"
    founder = Terminal(command, directory, home)
    invited_s = founder.wait_for("others join with", COMMAND_S)
    trained_s = founder.wait_for(r"loss \d\.\d+ ·", COMMAND_S)
    said = f"The invitation was there after {invited_s:.0f} s, a loss after {trained_s:.0f} s."
    page.add("Found a swarm", command, said, founder.text())
    for verb in ("dashboard", "status", "peers", "plan --explain", "leave"):
        _one(page, f"{program} {verb}", directory, home)
    founder.wait_for_end(COMMAND_S)
    _one(page, f'{program} generate --prompt "def main" --tokens 200', directory, home)
    _one(page, f"{program} doctor", directory, home)


def _one(page: Page, command: str, directory: Path, home: Path) -> None:
    terminal = Terminal(command, directory, home)
    elapsed_s = terminal.wait_for_end(COMMAND_S)
    title = command.split("p2p-dtfm ", 1)[1].split(" --")[0].capitalize()
    page.add(title, command, f"{elapsed_s:.1f} s.", terminal.text())


if __name__ == "__main__":
    main()
