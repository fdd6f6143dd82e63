"""What would make a step shorter: one change at a time, planned anew, and the step that each
gives."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.execution import AS_RUN
from p2p_dtfm.sim.scenario.scenario import Scenario, ScenarioLink, ScenarioPeer
from p2p_dtfm.sim.scenario.scenario_file import LARGEST_SCENARIO
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot
from p2p_dtfm.sim.scenario.what_if import what_if

GROUPS_TRIED = 4
PEERS_LIMIT = 24
"""The largest swarm whose changes are planned. A plan of 64 takes half a minute, and there are some
ten of them."""


@dataclass(frozen=True, slots=True)
class Change:
    """`step_ns` is predicted; None where there is no plan."""

    words: str
    step_ns: int | None


def changes_of(scenario: Scenario, spec: RunSpec) -> tuple[Change, ...]:
    """The changes for a scenario of up to `PEERS_LIMIT` peers; none for a larger one. One more peer
    is left out where the scenario does not say how it would be linked. That of a single peer need
    not say so."""
    if len(scenario.peers) > PEERS_LIMIT:
        return ()
    changes = []
    for words, swarm, how in _tried(scenario, spec):
        with suppress(UserError):
            changes.append(Change(words, _planned(swarm, how)))
    return tuple(changes)


def _tried(scenario: Scenario, spec: RunSpec) -> Iterator[tuple[str, Scenario, RunSpec]]:
    groups = tuple(dict.fromkeys(peer.group for peer in scenario.peers))
    for group in groups[:GROUPS_TRIED] if len(scenario.peers) < LARGEST_SCENARIO else ():
        yield f"one more peer in {group}", what_if(scenario, f"+1 {group}"), spec
    yield "all lines twice as fast", faster_lines(scenario), spec
    if all(peer.forward_flops for peer in scenario.peers):
        yield "all devices twice as fast", faster_devices(scenario), spec
    for words, changed in compressed(spec):
        yield words, scenario, changed


def compressed(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """The run with fewer bits on the lines, one kind of line at a time."""
    between: dict[str, object] = {"activations": ("bf16", "int8"), "gradients": ("bf16", "int8")}
    yield "int8 between stages, where it is shorter", with_codecs(spec, between)
    for codec in ("int8", "sparse"):
        if spec.codecs.reduction in ("fp32", "bf16"):
            yield f"{codec} between replicas", with_codecs(spec, {"reduction": codec})


def _planned(scenario: Scenario, spec: RunSpec) -> int | None:
    found = compute_plan(scenario_snapshot(scenario, spec, AS_RUN))
    return found.predicted_step_ns if isinstance(found, Plan) else None


def with_codecs(spec: RunSpec, update: dict[str, object]) -> RunSpec:
    """The run with some of its codecs replaced."""
    return spec.model_copy(update={"codecs": spec.codecs.model_copy(update=update)})


def faster_lines(scenario: Scenario) -> Scenario:
    """Twice the rate everywhere; latencies as they are."""
    links = {
        ends: ScenarioLink(link.latency_ns, 2 * link.bytes_per_s)
        for ends, link in scenario.links.items()
    }
    return replace(scenario, links=links, peers=tuple(map(_faster_line, scenario.peers)))


def _faster_line(peer: ScenarioPeer) -> ScenarioPeer:
    return replace(
        peer,
        uplink_bytes_per_s=2 * peer.uplink_bytes_per_s,
        downlink_bytes_per_s=2 * peer.downlink_bytes_per_s,
        link_cap_bytes_per_s=2 * peer.link_cap_bytes_per_s,
    )


def faster_devices(scenario: Scenario) -> Scenario:
    """Twice the speed of each device."""
    faster = (replace(peer, forward_flops=2 * (peer.forward_flops or 0)) for peer in scenario.peers)
    return replace(scenario, peers=tuple(faster))
