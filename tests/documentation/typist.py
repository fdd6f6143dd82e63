"""Types what a page says, in a directory of its own, and sees that each command does its work.

A command that only reads and writes files runs in this process, which has loaded torch already; a
daemon runs as a process of its own, with one thread and on loopback. The demo is the one that all
tests share.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2p_dtfm.cli import main
from tests.conftest import DemoRun
from tests.documentation.pages import Block

QUICK = {
    *("export", "generate", "id", "import", "leave"),
    *("peers", "plan", "prepare", "simulate", "status"),
}
CHEAP = {"P2P_DTFM_THREADS": "1", "P2P_DTFM_LISTEN": "/ip4/127.0.0.1/tcp/0"}
"""Settings of daemons that a page does not name."""
DEADLINE_S = 240.0


class Typist:
    """Types the commands of one page, one after the other."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, demo: DemoRun) -> None:
        self.directory = directory
        self._monkeypatch = monkeypatch
        self._demo = demo
        monkeypatch.chdir(directory)

    def type(self, block: Block) -> None:
        if block.language == "python":
            exec(compile(block.text, "<page>", "exec"), {"__name__": "__main__"})
            return
        for words in block.commands():
            assert Path(words[0]).name == "p2p-dtfm", f"no idea how to type {words}"
            self.p2p_dtfm(words[1:])

    def p2p_dtfm(self, arguments: Sequence[str]) -> None:
        """The program, to its end; it must succeed."""
        if arguments[0] == "demo":
            self._look_at_demo(arguments)
        elif arguments[0] in QUICK:
            self._in_this_process(arguments)
        else:
            self._to_its_end(arguments)

    def _in_this_process(self, arguments: Sequence[str]) -> None:
        self._monkeypatch.setattr(sys, "argv", ["p2p-dtfm", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None), f"{arguments}: {ended.value.code}"

    def _to_its_end(self, arguments: Sequence[str]) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "p2p_dtfm", *arguments],
            env={**os.environ, **CHEAP},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"

    def _look_at_demo(self, arguments: Sequence[str]) -> None:
        """What it leaves must lie where the page's other commands look for it."""
        *words, name = arguments
        typed = self._demo.done.args
        assert words == ["demo", "--steps", "40", "--keep"], "the demo of the tests is another one"
        assert all(word in typed for word in words)
        shutil.copytree(self._demo.directory, self.directory / name)
