"""Daemons that share one device and audit one another's work on it, in `benchmarks.gpu`."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.lies.played import LieCase, play

PEERS, LIARS = 4, 1
KINDS = ("flip", "bend", "lazy")
"""Three kinds: a gross lie, one that changes a thousandth of the elements by 1e-4, and one whose
work is as claimed. Nobody may find fault with the last."""


def audit_figures(device: torch.device) -> dict[str, Any]:
    """The result of each kind: in which of its lying steps the liar was out, and what differed from
    the promise. Losses are compared to those of one process on the processor."""
    found: dict[str, Any] = {}
    faults: list[str] = []
    for kind in KINDS:
        case = LieCase("tiny", kind, 1.0, PEERS, 1.0, LIARS, device=str(device))
        said: list[str] = []
        with tempfile.TemporaryDirectory(prefix="p2p-dtfm-gpu-") as name:
            verdict = play(Path(name), case, case.spec(read_run_spec("tiny")), said.append)
        found[kind] = {
            "steps": verdict.steps,
            "caught_after": verdict.caught_after,
            "barred": verdict.barred,
            "max_loss_difference": verdict.max_loss_difference,
            "step_s": verdict.usual_step_s,
        }
        faults += [f"{kind}: {violation}" for violation in verdict.violations]
    return {**found, "fault": "; ".join(faults)} if faults else found
