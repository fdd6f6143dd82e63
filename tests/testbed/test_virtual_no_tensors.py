"""Real daemons in virtual time in pipelines of two stages. The two members of one pipeline are
colluders, and claim to have sent each other bytes of which nobody can make a tensor. Auditors
failed on these, and had no word for or against either. Both were free of audits, at any rate, and
could make of their gradients what they liked."""

import math
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.messages.audit_messages import Boundary
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.step import stage_account
from p2p_dtfm.daemon.trainer.audited import audits
from p2p_dtfm.testbed.lies import in_work
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.virtual.lies import putting
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule
from p2p_dtfm.train.stage.replay.work import chunk_digest
from tests.testbed.pairs import planned_in_pairs
from tests.testbed.test_virtual_lies_in_pipelines import FOUND

KIND, STEPS = "no tensor", 8
NO_TENSOR = b"no tensor"
TOO_LARGE = struct.pack("f", 3e38)
"""Bytes of a number: no honest member computes from them."""
FIRSTS, LASTS, LIARS = "aceg", "bdfh", "ab"


def _claim_what_is_none(payload: bytes, lie: Lie) -> None:
    """The liar gives these bytes to every peer that asks for them."""
    honest, find, named = stage_account.edges_of, audits.Audits.find, chunk_digest(payload)

    def edges_of(plan: Any, me: str, work: Any, due: Any) -> Any:
        edges = honest(plan, me, work, due)
        if not lie.is_told(work.step):
            return edges
        return {n: Boundary(*(named if it else it for it in edge)) for n, edge in edges.items()}

    def found(self: Any, digest: str) -> Any:
        return payload if digest == named.hex() else find(self, digest)

    in_work.put(audits, "edges_of", edges_of)
    in_work.put(audits.Audits, "find", found)
    in_work.change_gradients(lie)


@pytest.mark.parametrize("is_tensor", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_nobody_is_free_of_audits_by_what_nobody_can_have_computed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tensor: bool
) -> None:
    spec = RunSpec.model_validate_json(make_run(tmp_path, STEPS).read_text())
    payload = TOO_LARGE * math.prod(spec.boundary_shape(1)) if is_tensor else NO_TENSOR
    monkeypatch.setitem(INSTALLED, KIND, partial(_claim_what_is_none, payload))
    monkeypatch.setattr(putting, "IN_WORK", (*putting.IN_WORK, KIND))
    planned_in_pairs(monkeypatch, LIES, FIRSTS, LASTS, evens_out=True)
    faults = tuple(Fault(1.0, math.inf, "lie", (it,), 0.0, KIND) for it in LIARS)
    names = tuple(FIRSTS + LASTS)
    schedule = Schedule(
        names, (), faults, is_audited=True, liars=tuple(LIARS), audit_rate=1.0, lie_together=True
    )
    (tmp_path / "player").mkdir()
    found = Player(tmp_path / "player", STEPS).play(LIES, schedule)
    assert found.problem == "" and found.lies and not found.stayed
    assert any(FOUND in report for report in found.reports), found.reports
