"""Schedules in which some lie in one way from the first second on, with audits."""

import math

from p2p_dtfm.testbed.virtual.seeds.faults import Fault, Schedule


def lying_to_the_end(kind: str, members: str, liars: str, rate: float) -> Schedule:
    """A member and a liar for each letter; several liars do it together."""
    return Schedule(
        tuple(members),
        (),
        tuple(Fault(1.0, math.inf, "lie", (name,), 0.0, kind) for name in liars),
        is_audited=True,
        liars=tuple(liars),
        lie_together=len(liars) > 1,
        audit_rate=rate,
    )
