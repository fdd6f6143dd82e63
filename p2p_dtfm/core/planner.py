"""From a snapshot to a plan."""

from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.snapshot import Snapshot


def compute_plan(snapshot: Snapshot) -> Plan | NoPlan:
    """The plan of a snapshot: a pure function, equal bytes everywhere."""
    raise AssertionError("under construction")
