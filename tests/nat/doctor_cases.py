"""What the doctor says of the network, at several places at once: one process with a thread in
each namespace, for torch takes long to load.

Its argument is a JSON list of [process id of a place, listen, initial peer]; it prints a JSON list
of findings by name for each.
"""

import asyncio
import ctypes
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.peers.checks.check import Check
from p2p_dtfm.daemon.peers.doctor import Examination, examine_network
from p2p_dtfm.daemon.peers.facts.newcomer import within_limits
from tests.core.builders import run_spec

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def go_to(process_id: int) -> None:
    namespace = os.open(f"/proc/{process_id}/ns/net", os.O_RDONLY)
    try:
        assert _libc.setns(namespace, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(namespace)


def examine_at(case: tuple[int, str, str]) -> dict[str, dict[str, object]]:
    """In a thread of its own: a namespace belongs to a thread, and to the processes it starts. Not
    in uvloop, of which two loops of one process may not start processes at the same time."""
    process_id, listen, initial_peer = case
    go_to(process_id)
    found: list[Check] = []
    newcomer = partial(within_limits, Settings(device="cpu", threads=1))
    what = Examination(
        Path("/nowhere"), (listen,), (), (initial_peer,), "cpu", 1, run_spec(), newcomer
    )
    asyncio.run(examine_network(what, None, found.append))
    return {check.name: check.as_json() for check in found}


def main() -> None:
    cases = json.loads(sys.argv[1])
    with ThreadPoolExecutor(len(cases)) as threads:
        print(json.dumps(list(threads.map(examine_at, cases))))


if __name__ == "__main__":
    main()
