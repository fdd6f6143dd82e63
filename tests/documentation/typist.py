"""Types what a page says, in a directory of its own, and sees that each command does its work.

A command that only reads and writes files runs in this process, which has loaded torch already.
A daemon runs beside, until the page says `leave` or ends, with one thread and on loopback. The demo
is the one that all tests share. What would change the machine itself is not typed.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from p2p_dtfm.cli import main
from p2p_dtfm.daemon.machine.local_client import ask_daemon, call_daemon
from p2p_dtfm.testbed.nursery import ForkedProcess
from tests.conftest import DemoRun
from tests.documentation.pages import ROOT, Block
from tests.e2e.helpers import DEADLINE_S, wait_until
from tests.forked import run_to_its_end, start_program

IN_THIS_PROCESS = {
    *("export", "generate", "id", "import", "invite", "leave", "pause", "resume"),
    *("peers", "plan", "prepare", "simulate", "spec", "status"),
}
SETTLED = {"training", "spare", "done"}
NOT_TYPED = {
    **dict.fromkeys(("sudo", "podman", "journalctl", "rm"), "changes the machine"),
    "pipx": "changes the machine; tests/packaging installs the wheel",
    "env CC=false .venv/bin/pip wheel": "tests/packaging/conftest.py builds it, without a network",
    "p2p-dtfm service": "changes the machine; tests/cli/test_service.py",
    "p2p-dtfm reproduce --out DIR": "takes a quarter of an hour; --quick is typed",
    "p2p-dtfm reproduce --quick --out DIR --rows": "rows of your own: tests/sim/test_own_rows.py",
    "p2p-dtfm --invite LINE --device all": "all devices of a machine: test_several_devices.py",
}
"""How commands begin that no test of pages types, and why not."""
INVITE = "invite?seconds=3600&may_invite=0"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
CHEAP = {"P2P_DTFM_THREADS": "1", "P2P_DTFM_LISTEN": LOOPBACK, "P2P_DTFM_LOG": "human"}
"""Settings of daemons that a page does not name."""


def why_not_typed(words: Sequence[str]) -> str:
    """The reason; empty for a command that is typed."""
    typed = " ".join(words)
    return next(
        (why for start, why in NOT_TYPED.items() if f"{typed} ".startswith(f"{start} ")), ""
    )


class Running:
    """A daemon or bootstrap node that a page has started."""

    def __init__(self, home: Path, process: ForkedProcess) -> None:
        self.home = home
        self.process = process

    def said(self) -> str:
        return "".join((self.home / name).read_text() for name in ("stdout", "stderr"))

    def state(self) -> str:
        assert self.process.poll() is None, self.said()
        return (ask_daemon(self.home, "status") or {"state": ""})["state"]

    def step(self) -> int:
        return (ask_daemon(self.home, "status") or {}).get("step") or 0

    def printed(self, pattern: str) -> str:
        """What the first group of `pattern` matches in the output so far, or empty."""
        assert self.process.poll() is None, self.said()
        found = re.search(pattern, self.said())
        return found[1] if found else ""


class Typist:
    """Types the commands of one page, one after the other."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, demo: Callable[[], DemoRun]
    ) -> None:
        self.directory = directory
        self.daemons: list[Running] = []
        self.nodes: list[Running] = []
        self.not_typed: list[str] = []
        self._monkeypatch = monkeypatch
        self._demo = demo
        (directory / "configs").symlink_to(ROOT / "configs")
        monkeypatch.chdir(directory)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # this tree's program, wherever it is typed
        monkeypatch.setenv("P2P_DTFM_HOME", str(directory / "home-0"))

    def type(self, block: Block) -> None:
        if block.language == "python":
            exec(compile(block.text, "<page>", "exec"), {"__name__": "__main__"})
            return
        for words in block.commands():
            if why_not_typed(words):
                self.not_typed.append(words[0])
            elif Path(words[0]).name == "p2p-dtfm":
                self.p2p_dtfm([self._filled_in(word) for word in words[1:]])
            elif words[0] == "make":
                subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True)
            else:
                subprocess.run(words, check=True)

    def p2p_dtfm(self, arguments: Sequence[str]) -> None:
        """Run the program. It must succeed, and a daemon must take part."""
        verb = arguments[0] if arguments else ""
        if not verb:
            self._come_back()
        elif verb == "demo" and "--audit" not in arguments:
            self._look_at_demo(arguments)
        elif verb == "bootstrap":
            self._start_node(arguments)
        elif verb in IN_THIS_PROCESS:
            self._in_this_process(arguments)
        elif verb.startswith("--") and "--exit-when-done" not in arguments:
            self._start_daemon(arguments)
        else:
            self._to_its_end(arguments)

    def found(self) -> None:
        """Found another user's swarm; a page's ADDRESS is an address in it."""
        self._start_daemon(["--run", "tiny"])
        self._monkeypatch.setenv("P2P_DTFM_HOME", str(self.directory / "home-1"))

    def end(self) -> None:
        """End what the page left running. Tests of their own check orderly ends, and orphans."""
        for running in (*self.daemons, *self.nodes):
            running.process.kill()
        for running in (*self.daemons, *self.nodes):
            running.process.wait()

    def _filled_in(self, word: str) -> str:
        if word in ("ADDRESS", "ADDRESS-OF-ANOTHER"):
            node = (*self.nodes, *self.daemons)[0]
            return node.printed(r"--initial-peers (/ip4/127\S+)")
        if word == "LINE":
            return str(call_daemon(self.daemons[0].home, INVITE, "POST")["line"])
        if word == "DIGEST":
            return self.daemons[0].printed(r"--run-digest ([0-9a-f]{64})")
        return word

    def _start_daemon(self, arguments: Sequence[str]) -> None:
        home = self.directory / f"home-{len(self.daemons)}"
        if "--listen" in arguments:  # the page's port may be taken here
            at = arguments.index("--listen") + 1
            arguments = [*arguments[:at], LOOPBACK, *arguments[at + 1 :]]
        running = self._start(home, [*arguments, "--home", str(home)], CHEAP)
        self.daemons.append(running)
        self._monkeypatch.setenv("P2P_DTFM_HOME", str(home))  # what is typed then is of this one
        wait_until(lambda: running.state() in SETTLED, f"{arguments} takes part")

    def _come_back(self) -> None:
        """The last daemon was killed, and its home takes up its former run."""
        last = self.daemons.pop()
        last.process.kill()
        last.process.wait()
        back = self._start(last.home, ["--home", str(last.home)], CHEAP)
        self.daemons.append(back)
        wait_until(lambda: back.state() in SETTLED, "it is back")

    def _start_node(self, arguments: Sequence[str]) -> None:
        home = self.directory / f"node-{len(self.nodes)}"
        listen = ["--home", str(home), "--listen", LOOPBACK]
        running = self._start(home, [*arguments, *listen], {})
        self.nodes.append(running)
        wait_until(lambda: running.printed(r"--initial-peers (/\S+)"), f"{arguments} is there")

    def _start(self, home: Path, arguments: Sequence[str], settings: dict[str, str]) -> Running:
        home.mkdir(exist_ok=True)
        with (home / "stdout").open("wb") as out, (home / "stderr").open("wb") as err:
            process = start_program(arguments, out, err, settings)
        return Running(home, process)

    def _in_this_process(self, arguments: Sequence[str]) -> None:
        last = self.daemons[-1] if self.daemons else None
        if arguments[0] == "leave" and last is not None and last.state() == "training":
            wait_until(lambda: last.step() > 1, "there is something to keep")
        self._monkeypatch.setattr(sys, "argv", ["p2p-dtfm", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None), f"{arguments}: {ended.value.code}"
        if arguments[0] == "leave":
            assert last is not None
            assert last.process.wait(DEADLINE_S) == 0, last.said()
            self.daemons.pop()
        elif arguments[0] == "pause":
            assert last is not None
            wait_until(lambda: last.state() == "paused", "it pauses")
        elif arguments[0] == "resume":
            assert last is not None
            wait_until(lambda: last.state() in SETTLED, "it takes part again")

    def _to_its_end(self, arguments: Sequence[str]) -> None:
        done = run_to_its_end(arguments, DEADLINE_S, CHEAP)
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"

    def _look_at_demo(self, arguments: Sequence[str]) -> None:
        """The demo's results must lie where the page's other commands look for them."""
        *words, name = arguments
        demo = self._demo()
        typed = demo.done.args
        assert words == ["demo", "--steps", "40", "--keep"], "the demo of the tests is another one"
        assert all(word in typed for word in words)
        shutil.copytree(demo.directory, self.directory / name)
