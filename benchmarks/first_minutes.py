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
import signal
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
PROGRAM = ".venv/bin/p2p-dtfm"
JOIN = PROGRAM + " --initial-peers {address} --home ~/second"
LOOKS = {
    "The dashboard's address": "dashboard",
    "What this daemon does": "status",
    "Who takes part": "peers",
    "Who holds what, and why": "plan --explain",
}
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
            f"exec {command}",  # a shell in between would die of Ctrl-C, and hang up on it
            shell=True,
            cwd=directory,
            env={**kept, "HOME": str(home), "TERM": "xterm-256color", "LANG": "C.UTF-8"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=_lead_the_terminal,  # so that Ctrl-C reaches it
        )
        os.close(theirs)
        self._keys = ours

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

    def press_ctrl_c(self) -> None:
        os.write(self._keys, b"\x03")

    def wait_for_end(self, limit_s: float) -> float:
        self.process.wait(limit_s)
        elapsed_s = time.monotonic() - self._began_s
        time.sleep(0.3)  # for what is still in the terminal
        return elapsed_s


def _lead_the_terminal() -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who runs in the background ignores it
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Page:
    """Written anew with each screen, so that what was seen is kept."""

    def __init__(self, out: Path, directory: Path, home: Path) -> None:
        self._out = out
        self._began_s = time.monotonic()
        self._hidden = {str(directory): "~/p2p-dtfm", str(home): "~"}
        processors, memory_gib = psutil.cpu_count(), psutil.virtual_memory().total / (1 << 30)
        today = datetime.date.today().isoformat()
        self._where = (
            f"`benchmarks/first_minutes.py` wrote this page on {today}, on a machine with "
            f"{processors} processor cores\nand {memory_gib:.0f} GiB of memory "
            f"({platform.system()}, Python {platform.python_version()}), whose load average was "
            f"{os.getloadavg()[0]:.1f} when it began.\n"
        )
        self._steps: list[tuple[str, str, float]] = []
        self._screens = ""

    def add(self, title: str, command: str, said: str, screen: str) -> None:
        for path, name in self._hidden.items():
            screen = screen.replace(path, name)
        screen = re.sub(r"#token=[\w-]+", "#token=...", screen)
        self._screens += f"\n## {title}\n\n{said}\n\n```text\n$ {command}\n{screen}\n```\n"
        self._steps.append((title, command, time.monotonic() - self._began_s))
        self._out.write_text(self._text(), encoding="utf-8")
        print(f"{title}: {said}", flush=True)

    def _text(self) -> str:
        rows = [
            f"| {int(at_s) // 60}:{int(at_s) % 60:02} | {title} | `{_short(command)}` |"
            for title, command, at_s in self._steps
        ]
        return (
            "# A newcomer's first five minutes\n\n"
            "What README says, typed into a fresh clone with an empty home, where everything is "
            "installed anew:\nwhen each screen was there, and what was on it.\n"
            f"{self._where}\n| minute | what was reached | by typing |\n|---|---|---|\n"
            + "\n".join(rows)
            + f"\n{self._screens}"
        )


def _short(command: str) -> str:
    return re.sub(r"/ip4/\S+", "ADDRESS", command.removeprefix(".venv/bin/"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary) / "home"
        home.mkdir()
        directory = Path(temporary) / "p2p-dtfm"
        page = Page(out, directory, home)
        began_s = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", ROOT, directory], check=True)
        _demo(page, directory, home, time.monotonic() - began_s)
        _found(page, directory, home)


def _demo(page: Page, directory: Path, home: Path, cloned_s: float) -> None:
    demo = Terminal("make demo", directory, home)
    installed_s = demo.wait_for(r"dashboard|step \d+/", INSTALL_S)
    trained_s = demo.wait_for(r"step [1-9]\d*/", INSTALL_S)
    said = (
        f"The clone took {cloned_s:.0f} s, the installation {installed_s:.0f} s; the first steps "
        f"were committed\n{trained_s - installed_s:.0f} s later. The address at the top opens the "
        "dashboard of one of the daemons."
    )
    page.add("It trains", "make demo", said, demo.text())
    ended_s = demo.wait_for_end(DEMO_S)
    said = f"The demo ended by itself {ended_s - installed_s:.0f} s after the installation."
    page.add("The demo's summary", "make demo", said, demo.text())


def _found(page: Page, directory: Path, home: Path) -> None:
    command = f"{PROGRAM} --run configs/tiny.toml"
    founder = Terminal(command, directory, home)
    invited_s = founder.wait_for("others join with", COMMAND_S)
    trained_s = founder.wait_for(r"loss \d\.\d+ ·", COMMAND_S)
    said = f"The line for others was there after {invited_s:.0f} s, a loss after {trained_s:.0f} s."
    page.add("A swarm of one's own", command, said, founder.text())
    joiner = _join(page, directory, home, founder)
    for title, words in LOOKS.items():
        _one(page, title, words, directory, home)
    ended_s = founder.wait_for("done for ", COMMAND_S)
    said = f"Founded {ended_s:.0f} s ago: all steps are done, and the model is on both disks."
    page.add("The run is done", command, said, founder.text())
    _one(page, "Leaving", "leave", directory, home)
    founder.wait_for_end(COMMAND_S)
    joiner.press_ctrl_c()
    joiner.wait_for_end(COMMAND_S)
    said = "The other one was told by Ctrl-C."
    page.add("Leaving by Ctrl-C", JOIN.format(address="ADDRESS"), said, joiner.text())
    _one(
        page, "What the model writes", 'generate --prompt "def main" --tokens 200', directory, home
    )
    _one(page, "Is anything wrong here?", "doctor", directory, home)


def _join(page: Page, directory: Path, home: Path, founder: Terminal) -> Terminal:
    """In a second terminal, with a home of its own since it is the same machine."""
    text = founder.text().replace("\n", "")
    address = re.search(r"--initial-peers (/ip4/\S+?/p2p/12D3KooW\w{44})", text)
    assert address is not None, text
    command = JOIN.format(address=address[1])
    joiner = Terminal(command, directory, home)
    part_s = joiner.wait_for(r"(training|spare) for .*(\n.*)*loss \d", COMMAND_S)
    said = (
        "In a second terminal. It is the same machine, so it gets a home of its own. It took part "
        f"after {part_s:.0f} s."
    )
    page.add("A second one joins", command, said, joiner.text())
    return joiner


def _one(page: Page, title: str, words: str, directory: Path, home: Path) -> None:
    command = f"{PROGRAM} {words}"
    terminal = Terminal(command, directory, home)
    elapsed_s = terminal.wait_for_end(COMMAND_S)
    page.add(title, command, f"It took {elapsed_s:.1f} s.", terminal.text())


if __name__ == "__main__":
    main()
