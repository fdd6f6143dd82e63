"""States of swarms that need not run: real snapshots and plans, made-up progress."""

import math
from dataclasses import dataclass, field, replace

import msgspec

from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.names import generated_name
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.dashboard.series import Series
from p2p_dtfm.daemon.dashboard.view_facts import view_state
from p2p_dtfm.sim.paper.named_plans import grid_plan
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot
from p2p_dtfm.web.api import Action
from p2p_dtfm.web.state import (
    BoardRow,
    ContributionBoard,
    Course,
    DashboardState,
    Event,
    Given,
    Live,
    Problem,
    RunFacts,
    Sample,
    Samples,
    Span,
    Timeline,
    TimelineLane,
    ViewState,
)

NOW_S = 1_790_000_000.0


@dataclass
class Example:
    """A provider whose state a test may change."""

    state: DashboardState
    asked: list[str] = field(default_factory=list)
    refusal: dict[str, object] | None = None
    """A button's answer, where it is not the action that the button asks for."""

    def __call__(self) -> DashboardState:
        return self.state

    def change_live(self, **changes: object) -> None:
        live = msgspec.structs.replace(self.state.live, **changes)
        self.state = msgspec.structs.replace(self.state, live=live)

    @property
    def actions(self) -> dict[str, Action]:
        """The actions that a daemon offers, or a paused one."""
        names = ("resume", "leave") if self.state.live.state == "paused" else ("pause", "leave")
        return {name: self._action(name) for name in names}

    def _action(self, name: str) -> Action:
        async def act() -> dict[str, object]:
            self.asked.append(name)
            return self.refusal or {"state": self.state.live.state}

        return act


def example(
    scenario: str,
    run: str,
    stages: int,
    steps: int = 700,
    step_ns: int = 10_400_000_000,
    only: tuple[str, ...] = (),
) -> Example:
    """A swarm of that scenario's peers, with names in libp2p's form, in pipelines of `stages`
    peers."""
    spec = read_run_spec(run)
    played = read_scenario(scenario)
    peers = tuple(replace(it, forward_flops=it.forward_flops or 10**11) for it in played.peers)
    made = scenario_snapshot(replace(played, peers=peers), spec)
    if only:
        kept = tuple(record for record in made.records if record.peer_id in only)
        made = msgspec.structs.replace(made, records=kept)
    snapshot = _with_peer_ids(made)
    first, *rest = snapshot.records
    longest = msgspec.structs.replace(first, name="<b>Ada & co. of London</b>"[:24])
    snapshot = msgspec.structs.replace(snapshot, records=(longest, *rest))
    order = tuple(record.peer_id for record in snapshot.records)
    plan = msgspec.structs.replace(
        grid_plan(order, snapshot.workload, stages), predicted_step_ns=step_ns * 97 // 100
    )
    me = plan.pipelines[0].stages[min(1, stages - 1)].peer_id
    view = view_state(View(snapshot, plan), spec, me, from_step=310)
    return Example(
        DashboardState(
            live=_live(me, steps, step_ns, snapshot, spec),
            run=_run_facts(spec, snapshot),
            view=view,
            history=_series(steps, spec.tokens_per_step / step_ns * 1e9).history(),
            timeline=_timeline(plan, step_ns),
            samples=SAMPLES,
            contribution=_contribution(view),
            events=_events(order, me),
        )
    )


def _with_peer_ids(snapshot: Snapshot) -> Snapshot:
    """The snapshot with peer ids for the scenario's names; equal ids for equal names."""
    letters = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"

    def named(name: str) -> str:
        value, text = int.from_bytes(name.encode(), "big") * 0x9E3779B97F4A7C15 % 58**40, ""
        for _ in range(44):
            value, text = value * 31 % 58**40 + 7, text + letters[value // 58**7 % 58]
        return f"12D3KooW{text}"

    records = tuple(
        msgspec.structs.replace(
            record,
            peer_id=named(record.peer_id),
            links={named(peer): link for peer, link in record.links.items()},
        )
        for record in snapshot.records
    )
    return msgspec.structs.replace(snapshot, records=records)


def _run_facts(spec: RunSpec, snapshot: Snapshot) -> RunFacts:
    work = snapshot.workload
    return RunFacts(
        name=spec.name,
        digest=spec.digest(),
        layer_count=work.layer_count,
        block_count=work.block_count,
        width=spec.model.width,
        context=spec.model.context,
        parameter_count=sum(work.cost(n).parameter_count for n in range(work.layer_count)),
        tokens_per_step=spec.tokens_per_step,
        total_steps=spec.total_steps,
    )


def _wobble(step: int) -> float:
    return math.sin(step * 12.9898) * math.cos(step * 4.1414)


def _loss(step: int) -> float:
    return 3.1 + 7.6 / (1 + step / 38) + 0.09 * _wobble(step)


def _series(steps: int, tokens_per_s: float) -> Series:
    series = Series()
    for step in range(steps):
        if step in (0, 140, 310):
            series.view_took_over(step)
        held_out = 3.14 + 7.6 / (1 + step / 38) if step % 50 == 0 else None
        rate = tokens_per_s * (0.74 if step < 140 else 0.88 if step < 310 else 1.0)
        rate *= 1 + 0.03 * _wobble(3 * step)
        series.committed(StepOutcome(step, 1.0, _loss(step), 1, held_out, None), rate)
    return series


def _live(me: str, steps: int, step_ns: int, snapshot: Snapshot, spec: RunSpec) -> Live:
    heard = tuple(
        None if record.peer_id == me else 0.4 + number % 5 * 0.3
        for number, record in enumerate(snapshot.records)
    )
    return Live(
        time_s=NOW_S,
        version="0.1.0",
        peer_id=me,
        name=generated_name(me),
        state="training",
        reason=f"step {steps:,} of {spec.total_steps:,}",
        since_s=NOW_S - 4000,
        step=steps,
        loss=_loss(steps - 1),
        held_out_loss=3.14 + 7.6 / (1 + steps // 50 * 50 / 38),
        tokens_per_s=spec.tokens_per_step / (step_ns / 1e9),
        step_ns=step_ns,
        eta_s=(spec.total_steps - steps) * step_ns / 1e9,
        committed_here=min(512, steps),
        next=(
            f"a held-out evaluation after step {steps // 50 * 50 + 50:,}",
            f"a checkpoint after step {steps // 100 * 100 + 100:,}",
        ),
        heard_s_ago=heard,
    )


def _events(order: tuple[str, ...], me: str) -> tuple[Event, ...]:
    others = [peer_id for peer_id in order if peer_id != me]
    if not others:
        return (Event(NOW_S - 4000, "view", "view 1 from step 0 on: 1 member"),)
    return (
        Event(NOW_S - 4000, "view", f"view 3 from step 310 on: {len(others) + 1} members"),
        Event(NOW_S - 4001, "joined", f"{generated_name(others[-1])} takes part"),
        Event(NOW_S - 4100, "fault", f"{generated_name(others[0])} was silent for 12 s"),
        Event(NOW_S - 5990, "note", "of step 140: 14 microbatches kept where computed, 3 redone"),
        Event(NOW_S - 6000, "view", f"view 2 from step 140 on: {len(others)} members"),
        Event(NOW_S - 6001, "left", f"{generated_name(others[0])} has left"),
        Event(NOW_S - 8000, "view", f"view 1 from step 0 on: {len(others)} members"),
    )


def _contribution(view: ViewState) -> ContributionBoard:
    given = Given(61_200, 512, 3_910.0, 201_000_000, 43_500_000)
    holders = [peer for peer in view.peers if peer.pipeline is not None]
    board = tuple(
        BoardRow(peer.peer_id, peer.name, 120_000.0 / (1 + number / 3))
        for number, peer in enumerate(holders)
    )
    ever = msgspec.structs.replace(given, steps=901)
    course = Course(began_s=NOW_S - 8000, losses=1, views=3)
    return ContributionBoard(
        today=given,
        week=given,
        ever=ever,
        board=board,
        board_peers=len(board),
        board_tokens=sum(row.tokens for row in board),
        board_steps=690,
        useful_tokens=60_000.0,
        repeated_tokens=1_200.0,
        course=course,
    )


SAMPLES = Samples(
    prompt="def ",
    written=tuple(
        Sample(step, text, 3.14 + 7.6 / (1 + step / 38))
        for step, text in (
            (0, "\x00\u07e1qK}\ufffd 9e;;wP\n<b>&amp;</b>"),
            (50, "te tre the s selt ( ae, in  to sere\n  te"),
            (100, "set(self, name):\n    return self.name\n\nclass Error(Exception):\n    pass"),
        )
    ),
)


def _timeline(plan: Plan, step_ns: int) -> Timeline:
    """One forward and one backward, as a pipeline of equal stages runs them."""
    pipeline = plan.pipelines[0]
    count, depth = pipeline.microbatch_count, len(pipeline.stages)
    forward = int(step_ns * 0.8 / (count + depth - 1) / 3)
    lanes = []
    for position, stage in enumerate(pipeline.stages):
        spans: list[Span] = []
        now, forwards = position * forward, 0
        spans.append(Span("wait", 0, 0, now))
        for backward in range(count):
            while forwards < min(count, backward + depth - position):
                start = max(now, (position + forwards) * forward)
                spans.append(Span("forward", forwards, start, start + forward))
                now, forwards = start + forward, forwards + 1
            ready = depth * forward + (depth - 1 - position) * 2 * forward + backward * 3 * forward
            if ready > now:
                spans.append(Span("wait", 0, now, ready))
            now = max(now, ready)
            spans.append(Span("backward", backward, now, now + 2 * forward))
            now += 2 * forward
        reduced = int(step_ns * 0.955)
        spans.append(Span("reduce", stage.first_layer, now, reduced))
        spans.append(Span("commit", 0, reduced, int(step_ns * 0.985)))
        spans.append(Span("apply", 0, int(step_ns * 0.985), step_ns))
        lanes.append(TimelineLane(stage.peer_id, tuple(spans), 0 if position == 1 else 1_800_000))
    return Timeline(699, step_ns, tuple(lanes))


def sixty_four() -> Example:
    """Eight pipelines of eight stages over the world."""
    return example("paper-5-world-wide", "gpt3-xl", 8)


def two() -> Example:
    """One pipeline of two stages, in a bad moment."""
    found = example(
        "two-cities", "tiny", 2, steps=120, step_ns=380_000_000, only=("london-1", "berlin-1")
    )
    view = found.state.view
    assert len(view.peers) >= 2
    found.change_live(
        problems=(
            Problem(
                f"waits for {view.peers[0].name} for 14 s",
                "if its computer sleeps, wake it; else the others go on without it",
            ),
        ),
        marks=("shaped links: two-cities",),
    )
    return found


def all_replicas() -> Example:
    """Sixty-four pipelines of one stage each."""
    return example("paper-5-world-wide", "gpt3-xl", 1)
