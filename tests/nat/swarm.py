"""Daemons and bootstrap nodes in the namespaces of `home_networks`."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from p2p_dtfm.testbed.local_swarm import Child, started, stop_all
from tests.nat.home_networks import Namespace

START_DEADLINE_S = 120.0
PORT = 31331
ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM")
"""Even when this process is killed: a bootstrap node does not watch its standard input."""


class HomeSwarm:
    """A context manager: at its end all children are gone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def bootstrap(self, place: Namespace, public_host: str, *more: str) -> tuple[Child, str]:
        """A bootstrap node, and its address."""
        arguments = ["bootstrap", "--json", "--log", "human", *more]
        child = self._start(place, [*arguments, "--listen", f"/ip4/{public_host}/tcp/{PORT}"])
        return child, json.loads(first_line(child))["addresses"][0]

    def daemon(self, place: Namespace, arguments: Sequence[str]) -> Child:
        own = ["--until-stdin-closes", "--log", "human", "--threads", "1", "--dashboard", "off"]
        return self._start(place, [*own, *arguments])

    def _start(self, place: Namespace, arguments: Sequence[str]) -> Child:
        home = self._directory / f"peer-{len(self.children)}"
        home.mkdir(parents=True)
        command = [*ENDS_WITH_US, *place.enter, sys.executable, "-m", "p2p_dtfm", *arguments]
        child = started([*command, "--home", str(home)], home)
        self.children.append(child)
        return child

    def __exit__(self, *problem: object) -> None:
        stop_all(self.children)


def first_line(child: Child) -> str:
    """What a child says first on its standard output."""
    end_s = time.monotonic() + START_DEADLINE_S
    while not (text := (child.home / "stdout").read_text()).endswith("\n"):
        assert child.running and time.monotonic() < end_s, child.log_tail()
        time.sleep(0.05)
    return text.splitlines()[0]
