"""What would make a step shorter: one change at a time, planned anew, and what each comes to."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.execution import AS_RUN
from p2p_dtfm.sim.scenario.scenario import Scenario, ScenarioLink, ScenarioPeer
from p2p_dtfm.sim.scenario.scenario_file import LARGEST_SCENARIO
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot
from p2p_dtfm.sim.scenario.what_if import what_if

GROUPS_TRIED = 4
PEERS_LIMIT = 24
"""A plan of 64 takes half a minute, and there are some ten of them."""


@dataclass(frozen=True, slots=True)
class Change:
    """`step_ns` is predicted; None where there is no plan."""

    words: str
    step_ns: int | None


def changes_of(scenario: Scenario, spec: RunSpec) -> tuple[Change, ...]:
    """Of a scenario of up to `PEERS_LIMIT` peers; of a larger one nothing."""
    if len(scenario.peers) > PEERS_LIMIT:
        return ()
    return tuple(
        Change(words, _planned(swarm, how)) for words, swarm, how in _tried(scenario, spec)
    )


def _tried(scenario: Scenario, spec: RunSpec) -> Iterator[tuple[str, Scenario, RunSpec]]:
    groups = tuple(dict.fromkeys(peer.group for peer in scenario.peers))
    for group in groups[:GROUPS_TRIED] if len(scenario.peers) < LARGEST_SCENARIO else ():
        yield f"one more peer in {group}", what_if(scenario, f"+1 {group}"), spec
    yield "all lines twice as fast", _faster_lines(scenario), spec
    if all(peer.forward_flops for peer in scenario.peers):
        yield "all devices twice as fast", _faster_devices(scenario), spec
    between: dict[str, object] = {"activations": ("bf16", "int8"), "gradients": ("bf16", "int8")}
    yield "int8 between stages, where it is shorter", scenario, _with_codecs(spec, between)
    if spec.codecs.reduction == "fp32":
        yield "int8 between replicas", scenario, _with_codecs(spec, {"reduction": "int8"})


def _planned(scenario: Scenario, spec: RunSpec) -> int | None:
    found = compute_plan(scenario_snapshot(scenario, spec, AS_RUN))
    return found.predicted_step_ns if isinstance(found, Plan) else None


def _with_codecs(spec: RunSpec, update: dict[str, object]) -> RunSpec:
    return spec.model_copy(update={"codecs": spec.codecs.model_copy(update=update)})


def _faster_lines(scenario: Scenario) -> Scenario:
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


def _faster_devices(scenario: Scenario) -> Scenario:
    faster = (replace(peer, forward_flops=2 * (peer.forward_flops or 0)) for peer in scenario.peers)
    return replace(scenario, peers=tuple(faster))


def changes_html(before_ns: int, changes: Sequence[Change]) -> str:
    """A list of bars, as wide as the page is; each as long as its step."""
    if not changes:
        return ""
    longest = max([before_ns, *(each.step_ns or 0 for each in changes)])
    rows = [_row("as it is", before_ns, before_ns, longest)]
    rows += [_row(each.words, each.step_ns, before_ns, longest) for each in changes]
    return (
        "<h2>What would change a step</h2>"
        "<p>Each alone, planned anew; predicted. A plan is searched for, so that what should help "
        "may come out a little longer. What compression costs in loss is another "
        "question: p2p-dtfm plan --advise.</p>"
        f'<table class="changes">{"".join(rows)}</table>'
    )


def _row(words: str, step_ns: int | None, before_ns: int, longest_ns: int) -> str:
    if step_ns is None:
        return f"<tr><td>{html.escape(words)}</td><td>no plan</td></tr>"
    percent = 100 * (step_ns / before_ns - 1)
    told = "" if abs(percent) < 0.05 else f" ({percent:+.1f}%)"
    return (
        f'<tr><td>{html.escape(words)}<br><meter max="{longest_ns}" value="{step_ns}" '
        f'aria-label="{html.escape(words)}"></meter></td>'
        f"<td>{step_ns / 1e9:.3f} s{told}</td></tr>"
    )
