"""What one change would bring, found by making plans anew."""

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.sim.advice.changes import changes_of
from p2p_dtfm.sim.scenario.execution import AS_RUN
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot


def test_each_change_is_planned_anew() -> None:
    scenario, spec = read_scenario("three-homes"), read_run_spec("gpt2-small")
    before = compute_plan(scenario_snapshot(scenario, spec, AS_RUN))
    assert isinstance(before, Plan)
    found = {each.words: each.step_ns for each in changes_of(scenario, spec)}
    groups = {peer.group for peer in scenario.peers}
    assert {words.rsplit(" ", 1)[1] for words in found if words.startswith("one more")} == groups
    for words in ("all devices twice as fast", "int8 between replicas", "sparse between replicas"):
        assert (found[words] or 0) < before.predicted_step_ns, words
