"""The daemon's figures for Prometheus, made when they are asked for."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2p_dtfm.web.state import DashboardState

STATES = (
    "starting", "joining", "measuring", "syncing", "waiting", "spare", "training", "paused", "done",
    "leaving", "stopped",
)  # fmt: skip
Provider = Callable[[], DashboardState]


def metrics_text(provider: Provider) -> bytes:
    """Prometheus' text format, version 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(provider))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    def collect(self) -> Iterator[Metric]:
        state = self._provider()
        yield from _about_the_run(state)
        yield from _about_the_view(state)


def _about_the_run(state: DashboardState) -> Iterator[Metric]:
    live, run = state.live, state.run
    names = {
        "version": live.version,
        "peer": live.peer_id,
        "run": run.name if run else "",
        "run_digest": run.digest if run else "",
    }
    info = GaugeMetricFamily("p2p_dtfm_info", "Which daemon this is.", labels=list(names))
    info.add_metric(list(names.values()), 1)
    yield info
    doing = GaugeMetricFamily("p2p_dtfm_state", "1 for the present state.", labels=["state"])
    for name in STATES:
        doing.add_metric([name], float(name == live.state))
    yield doing
    yield _gauge("state_since_seconds", "When the present state began.", live.since_s)
    yield _gauge("step", "Steps committed by the swarm.", live.step)
    yield _gauge("steps_total", "Steps of the run.", run.total_steps if run else None)
    committed = CounterMetricFamily("p2p_dtfm_steps_seen", "Steps committed while this ran.")
    committed.add_metric([], live.committed_here)
    yield committed
    undone = CounterMetricFamily(
        "p2p_dtfm_steps_undone", "Steps taken back because who had a hand in them was barred."
    )
    undone.add_metric([], live.undone_here)
    yield undone
    yield _gauge("loss", "Of the last step, in nats per token.", live.loss)
    yield _gauge("held_out_loss", "Latest, in nats per token.", live.held_out_loss)
    yield _gauge("tokens_per_second", "Of the whole swarm, of late.", live.tokens_per_s)
    yield _gauge("step_seconds", "Of late.", live.step_ns and live.step_ns / 1e9)
    yield _gauge("time_left_seconds", "Until the last step, as of late.", live.eta_s)
    yield _gauge("problems", "What is wrong now.", len(live.problems))
    refused = CounterMetricFamily(
        "p2p_dtfm_refused",
        "What other peers sent and the gate turned away.",
        labels=["sender", "kind", "reason"],
    )
    for each in live.refused:
        refused.add_metric([each.sender, each.kind, each.reason], each.count)
    yield refused


def _about_the_view(state: DashboardState) -> Iterator[Metric]:
    view, live = state.view, state.live
    yield _gauge("view", "Number of the view in force.", view.number)
    is_in_one = view.number is not None
    yield _gauge("members", "Of the view in force.", len(view.peers) if is_in_one else None)
    yield _gauge("pipelines", "Of the plan in force.", len(view.pipelines) if is_in_one else None)
    predicted = view.predicted_step_ns / 1e9 if view.predicted_step_ns else None
    yield _gauge("predicted_step_seconds", "As the plan says.", predicted)
    part = view.part
    yield _gauge("compute_share", "This peer's part of a step.", part.share if part else None)
    heard = GaugeMetricFamily(
        "p2p_dtfm_peer_heard_seconds_ago", "Since a member last spoke.", labels=["peer"]
    )
    for peer, ago in zip(view.peers, live.heard_s_ago, strict=False):
        if ago is not None:
            heard.add_metric([peer.peer_id], ago)
    yield heard
    if view.me is None:
        return
    rate = GaugeMetricFamily(
        "p2p_dtfm_link_bytes_per_second", "Measured, slower direction.", labels=["peer"]
    )
    trip = GaugeMetricFamily("p2p_dtfm_link_round_trip_seconds", "Measured.", labels=["peer"])
    seen: set[int] = set()
    for flow in view.flows:
        if view.me not in (flow.here, flow.there):
            continue
        other = flow.there if flow.here == view.me else flow.here
        if other in seen:
            continue
        seen.add(other)
        if flow.bytes_per_s is not None:
            rate.add_metric([view.peers[other].peer_id], flow.bytes_per_s)
        if flow.round_trip_ns is not None:
            trip.add_metric([view.peers[other].peer_id], flow.round_trip_ns / 1e9)
    yield rate
    yield trip


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    """A gauge, without a sample where the value is not known: a made-up one would be drawn."""
    family = GaugeMetricFamily(f"p2p_dtfm_{name}", text)
    if value is not None:
        family.add_metric([], value)
    return family
