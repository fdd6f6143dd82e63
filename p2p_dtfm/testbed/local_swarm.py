"""Several real daemons as child processes on this machine, over libp2p on loopback.

For the demo, and for tests that want the real thing. No child outlives the parent, whatever happens
to it: each child watches its standard input, which closes when the parent ends.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.local_client import ask_daemon
from p2p_dtfm.daemon.machine.settings import PREFIX
from p2p_dtfm.testbed.nursery import NURSERY, ForkedProcess

INVITATION = "--initial-peers "
START_DEADLINE_S = 300.0
POLL_S = 0.05
STOP_DEADLINE_S = 30.0
LOG_TAIL_LINES = 20
ANSWERS_WITHIN_S = 1.0


@dataclass
class Child:
    """One daemon. Its home holds `stdout`, `stderr`, and all that daemons keep."""

    name: str
    home: Path
    process: "ForkedProcess | subprocess.Popen[bytes]"

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def log_tail(self) -> str:
        lines = (self.home / "stderr").read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def invitation(self) -> str | None:
        """The address that the founder printed; None if it has printed none yet."""
        for line in (self.home / "stdout").read_text(errors="replace").splitlines():
            if INVITATION in line:
                return line.split(INVITATION, 1)[1].strip()
        return None

    def events(self) -> list[dict[str, Any]]:
        """The peer's history of the run, without a line that is being written."""
        found = []
        for path in sorted(self.home.glob("runs/*/events.jsonl")):
            whole = path.read_text().rpartition("\n")[0]
            found += [json.loads(line) for line in whole.splitlines()]
        return found

    def status(self) -> dict[str, Any] | None:
        """The daemon's own status, or None while it cannot be asked."""
        return ask_daemon(self.home, "status")

    def answers(self) -> bool:
        """Whether the daemon has begun, and can be asked just now."""
        return ask_daemon(self.home, "status", timeout_s=ANSWERS_WITHIN_S) is not None


class LocalSwarm:
    """A context manager: at its end all children are gone.

    Python runs `module` as each daemon: the program itself, or one that changes the program to
    compare.
    """

    def __init__(
        self, directory: Path, arguments: Sequence[str] = (), module: str = "p2p_dtfm"
    ) -> None:
        self.directory = directory
        self._module = module
        self.children: list[Child] = []
        self._arguments = tuple(arguments)

    def __enter__(self) -> "LocalSwarm":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def home(self, number: int) -> Path:
        """The home of the daemon that is started as the given one. It may be filled before."""
        return self.directory / f"peer-{number}"

    def start(self, arguments: Sequence[str], name: str = "", home: Path | None = None) -> Child:
        """Starts a daemon with these arguments besides those that all have."""
        home = home or self.home(len(self.children))
        name = name or home.name
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        options = ["--home", str(home), "--until-stdin-closes"]
        options += ["--listen", "/ip4/127.0.0.1/tcp/0", "--log", "human", "--ids"]
        options += ["--device", "cpu"]  # all of them would share one accelerator
        given = [*options, *self._arguments, *arguments]
        with (home / "stdout").open("ab") as output, (home / "stderr").open("ab") as errors:
            for file in (output, errors):
                os.fchmod(file.fileno(), 0o600)
            # a user's settings for a daemon of their own do not apply to these
            process = NURSERY.start(self._module, given, output, errors, without=(PREFIX,))
        child = Child(name, home, process)
        self.children.append(child)
        return child

    def found(
        self, arguments: Sequence[str], name: str = "", home: Path | None = None
    ) -> tuple[Child, str]:
        """Starts a founder, and returns when it has printed its address. Raises `UserError`."""
        child = self.start(arguments, name, home)
        end_s = time.monotonic() + START_DEADLINE_S
        while (address := child.invitation()) is None:
            if not child.running or time.monotonic() > end_s:
                raise UserError(
                    f"the founder did not start:\n{child.log_tail()}",
                    "see its last lines above",
                    exit_code=1,
                )
            time.sleep(POLL_S)
        return child, address

    def join(
        self,
        address: str,
        arguments: Sequence[str] = (),
        name: str = "",
        home: Path | None = None,
    ) -> Child:
        return self.start(["--initial-peers", address, *arguments], name, home)

    def stop(self) -> None:
        stop_all(self.children)


def started(command: Sequence[str], home: Path) -> Child:
    """Starts a process where no nursery could: in another network namespace."""
    with (home / "stdout").open("ab") as output, (home / "stderr").open("ab") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    return Child(home.name, home, process)


def stop_all(children: Sequence[Child]) -> None:
    """Ends them: kindly at first, after `STOP_DEADLINE_S` by force."""
    for child in children:
        if child.running:
            child.process.send_signal(signal.SIGTERM)
    end_s = time.monotonic() + STOP_DEADLINE_S
    for child in children:
        try:
            child.process.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        if child.process.stdin is not None:
            child.process.stdin.close()
