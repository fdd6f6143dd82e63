"""Benchmarks still name what there is: nothing else reads them between two times that they run."""

import ast
import importlib
from pathlib import Path

import msgspec
import pytest

from benchmarks import daemon_with_plan
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.schedule.pipeline_order import StageOrder
from p2p_dtfm.daemon.machine.world import Machine
from tests.core.planning import Peer, snapshot

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_what_benchmarks_import_is_there() -> None:
    missing = []
    for path in sorted(BENCHMARKS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("p2p_dtfm"):
                module = importlib.import_module(node.module or "")
                missing += [
                    f"{path.name}: {node.module}.{name.name}"
                    for name in node.names
                    if not hasattr(module, name.name) and not _is_module(node.module, name.name)
                ]
    assert not missing


def _is_module(package: str | None, name: str) -> bool:
    try:
        importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def test_the_daemon_that_is_given_a_plan_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given one for weeks, and took the planner's."""
    monkeypatch.setattr(Machine, "plan", Machine.plan)
    seen = snapshot([Peer()] * 3)
    ours = compute_plan(seen)
    assert isinstance(ours, Plan)
    forced = msgspec.structs.replace(ours, predicted_step_ns=ours.predicted_step_ns + 1)
    daemon_with_plan.force(forced)
    assert Machine().plan(seen) == forced != ours
    fewer = snapshot([Peer()] * 2)
    assert Machine().plan(fewer) == compute_plan(fewer), "before all its peers are there"


def test_what_executes_plans_as_dt_fm_did_replaces_what_there_is() -> None:
    assert isinstance(StageOrder._forward_can_run, property)
    assert isinstance(StageOrder._backward_can_run, property)
    assert callable(daemon_with_plan.wire_plan._weights)
