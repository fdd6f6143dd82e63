"""The daemon where one plans for all of its machine: what `benchmarks.many_daemons` starts.

A plan follows from the snapshot alone. So a daemon that computes one leaves it in a folder under
the snapshot's digest, and the others take it from there. On computers of their own they would have
it at the same time. Nothing of the product knows of this.
"""

import fcntl
import os
from pathlib import Path

import msgspec

from p2p_dtfm.cli import main
from p2p_dtfm.core.planner import planner
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.daemon.machine import world

PLANS_VARIABLE = "BENCHMARK_PLANS"


def share_plans(folder: Path) -> None:
    """From now on this process computes those plans only that no other one has left here."""

    def compute_plan(snapshot: Snapshot) -> Plan | NoPlan:
        path = folder / snapshot.digest()
        with (folder / f"{snapshot.digest()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return msgspec.json.decode(path.read_bytes(), type=Plan)
            plan = planner.compute_plan(snapshot)
            if isinstance(plan, Plan):
                path.write_bytes(msgspec.json.encode(plan))
            return plan

    world.compute_plan = compute_plan


if __name__ == "__main__":
    share_plans(Path(os.environ[PLANS_VARIABLE]))
    main()
