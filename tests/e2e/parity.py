"""What a swarm committed, against the plain loop in one process on the same data."""

import torch

from p2p_dtfm.testbed.local_swarm import Child
from p2p_dtfm.testbed.plain_losses import plain_losses
from tests.e2e.helpers import losses

TOLERANCE = 1e-4


def assert_equals_the_plain_loop(
    child: Child, steps: int, *, may_repeat: bool = False, besides: Child | None = None
) -> None:
    """`may_repeat`: steps after the last checkpoint were committed twice, before and after.
    `besides`: the daemon that went on while this one was away; what it committed meanwhile counts
    as well."""
    torch.set_num_threads(1)
    expected = plain_losses(child.home, steps)
    assert expected is not None, "no checkpoint was saved"
    committed = [
        (event["step"], event["loss"])
        for event in (*child.events(), *(besides.events() if besides is not None else ()))
        if event["event"] == "step" and event["loss"] is not None
    ]
    if not may_repeat:
        assert [step for step, _ in committed] == sorted(losses(child)), "each step commits once"
    seen = {step for step, _ in committed if step < steps}
    assert sorted(seen) == list(range(steps)), "no step is missing"
    worst = max(abs(loss - expected[step]) for step, loss in committed if step < steps)
    assert worst < TOLERANCE, f"largest difference {worst}"
