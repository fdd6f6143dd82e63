"""A peer that is sent what no correct peer sends waits until others have found that out, too."""

from typing import Any

from p2p_dtfm.core.liveness.pace import SECOND_NS
from p2p_dtfm.daemon.trainer.step_watch import StepWatch
from tests.core.builders import run_spec
from tests.core.test_stalls import A, view_of


def test_who_takes_long_for_a_step_takes_long_to_find_out() -> None:
    """On machines that took 2 s for a step, auditors found out 0.3 s and more apart that a member
    shows no tensors. Each accused it alone, and two honest auditors were out for it."""
    waits: Any = None
    watch = StepWatch(A, run_spec(), (), waits, 2 * SECOND_NS)
    assert watch.grace_s == 0.25
    for step_s, grace_s in ((0.1, 0.25), (2.0, 1.0), (30.0, 2.0)):
        watch.took_over(view_of((4,)), 3)
        for number in range(9):
            watch.committed(int(number * step_s * SECOND_NS))
        assert watch.grace_s == grace_s
