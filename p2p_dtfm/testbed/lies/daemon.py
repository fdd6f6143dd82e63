"""The program, run as `python -m p2p_dtfm.testbed.lies.daemon`. It lies if its environment says so.

All daemons say that they are equal and near, so that plans give each of them all layers, or as many
as `MEMORY_OF_A_DAEMON` has room for. If nobody else has a layer, nobody can compute its work again.
"""

import os
import runpy
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from p2p_dtfm.core.protocol.records import Device, Link
from p2p_dtfm.daemon.machine import world
from p2p_dtfm.daemon.node import daemon
from p2p_dtfm.daemon.peers import self_record
from p2p_dtfm.testbed.lies.equal import equal_device
from p2p_dtfm.testbed.lies.evasions import EVASIONS
from p2p_dtfm.testbed.lies.in_sums import IN_SUMS
from p2p_dtfm.testbed.lies.in_words import IN_WORDS
from p2p_dtfm.testbed.lies.in_work import IN_WORK
from p2p_dtfm.testbed.lies.late_claims import LATE_CLAIMS
from p2p_dtfm.testbed.lies.lie import LIE_VARIABLE, MEMORY_VARIABLE, PACE_VARIABLE, Lie, put
from p2p_dtfm.testbed.lies.of_peers import OF_PEERS, find_what_suits
from p2p_dtfm.testbed.lies.whispers import WHISPERS
from p2p_dtfm.train.stage.measure import select_device, use_threads
from p2p_dtfm.train.stage.timed import TimedStageRunner

MEMORY_BYTES = 4 << 30
NEAR = Link(50_000, 4 << 30)
INSTALLED: dict[str, Callable[[Lie], None]] = {
    **IN_WORK,
    **EVASIONS,
    **LATE_CLAIMS,
    **IN_SUMS,
    **IN_WORDS,
    **OF_PEERS,
    **WHISPERS,
}
"""Lies by kind, without those that only concern whom a liar audits."""


def be_equal_and_near() -> None:
    is_paced = bool(os.environ.get(PACE_VARIABLE))
    memory_bytes = int(os.environ.get(MEMORY_VARIABLE, MEMORY_BYTES))

    def device(machine: object, spec: object, setting: str, threads: int, *more: object) -> Device:
        use_threads(threads)
        return equal_device(memory_bytes, is_paced, select_device(setting).type)

    take = self_record.SelfRecord.make

    def make(self: Any, *arguments: Any) -> Any:
        self._links = dict.fromkeys(self._links, NEAR)
        return take(self, *arguments)

    put(world.Machine, "measure_device", device)
    put(daemon, "exclusive_name", lambda device: None)  # one card is there for all daemons
    put(self_record.SelfRecord, "make", make)
    if is_paced:
        runner = partial(TimedStageRunner, equal_device(memory_bytes, is_paced))
        put(world.Machine, "stage_runner", lambda *arguments: runner)


def install(lie: Lie) -> None:
    """Puts the lie into this process, for good."""
    if lie.kind in INSTALLED:
        INSTALLED[lie.kind](lie)
    find_what_suits(lie)


def main() -> None:
    be_equal_and_near()
    if told := os.environ.get(LIE_VARIABLE):
        install(msgspec.json.decode(told, type=Lie))
    runpy.run_module("p2p_dtfm", run_name="__main__")


if __name__ == "__main__":
    main()
