"""Watches one daemon for its dashboard, terminal and metrics; nothing of it reaches training."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from p2p_dtfm import __version__
from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.dashboard.judged import JudgedByFew
from p2p_dtfm.daemon.dashboard.peer_map import Points
from p2p_dtfm.daemon.dashboard.seen import EVENTS_LIMIT, Events, Seen
from p2p_dtfm.daemon.dashboard.view_facts import points_of, view_state
from p2p_dtfm.daemon.dashboard.waits import Wait
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.telemetry.contribution import Contributions
from p2p_dtfm.daemon.telemetry.names import PEER_ID
from p2p_dtfm.daemon.telemetry.problems import (
    BARRED,
    NAMES_TOLD,
    SILENT_S,
    UNHEARD_S,
    Sight,
    problems_in,
)
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.ports import now
from p2p_dtfm.web.state import (
    ContributionBoard,
    DashboardState,
    Event,
    Live,
    MeasuredWorth,
    Problem,
    RefusedCount,
    RunFacts,
    Samples,
    Timeline,
    ViewState,
)

ANOTHER_AFTER_S = 600.0

log = logging.getLogger("p2p_dtfm")


class Observer:
    """`state()` is cheap: what changes seldom is made once and kept."""

    def __init__(
        self,
        status: Status,
        seen: Seen | None = None,
        overdue: Callable[[], Sequence[Wait]] = tuple,
    ) -> None:
        """`overdue`: waits of this daemon's that are older than they may be."""
        self.marks: tuple[str, ...] = ()
        self.of_this_machine: Callable[[], tuple[str, ...]] = tuple
        """Ids of the peers that this machine's devices are."""
        self._status = status
        self._overdue = overdue
        self._timeline = Timeline()
        self._peer_id = ""
        self._messenger: Messenger | None = None
        self._refused: Callable[[], tuple[RefusedCount, ...]] = tuple
        self._agreement: Agreement | None = None
        self._spec: RunSpec | None = None
        self._run: RunFacts | None = None
        self._view: View | None = None
        self._view_state = ViewState()
        self._points: Points = {}
        self._judges = JudgedByFew()
        self._making: asyncio.Task[ViewState] | None = None
        self.seen = seen or Seen()
        self._names = self.seen.names
        self._contributions: Contributions | None = None
        self._has_given_more = False
        self._series = self.seen.series
        self._events = self.seen.events
        self._before: tuple[float, int] | None = None
        self._told_step = 0
        self._last_commands: tuple[str, ...] = ()
        self._is_settled: Callable[[], bool] = lambda: False
        self._committed_s = now.monotonic_s()
        self._usual_rate: float | None = None
        self._warnings = _Warnings(self._events, self._shown)

    def begin(self) -> None:
        """Warnings of the log are events from now on, until `close`."""
        log.addHandler(self._warnings)

    def close(self) -> None:
        log.removeHandler(self._warnings)
        if self._making is not None:
            self._making.cancel()

    # what the daemon tells -----------------------------------------------------------------------

    def guarded_by(self, refused: Callable[[], tuple[RefusedCount, ...]]) -> None:
        """What the gate of this daemon has turned away."""
        self._refused = refused

    def meets(self, messenger: Messenger) -> None:
        """The daemon has an identity and can be spoken to."""
        self._peer_id = messenger.me
        self._messenger = messenger

    def came_to(self, tokens_per_s: float, members: int, step: int) -> None:
        """What the swarm did before this peer came, as it measured itself; 0 if not known. `step`:
        where it was."""
        self._told_step = step
        self._before = (tokens_per_s, members) if tokens_per_s > 0 and members > 0 else None

    def measures_with(self, is_settled: Callable[[], bool]) -> None:
        """`is_settled`: whether the rate in force says something of the present view."""
        self._is_settled = is_settled

    def trains(
        self, spec: RunSpec, run_digest: str, workload: Workload, agreement: Agreement
    ) -> None:
        """The daemon knows its run."""
        self._spec = spec
        self._agreement = agreement
        self._run = RunFacts(
            name=spec.name,
            digest=run_digest,
            layer_count=workload.layer_count,
            block_count=workload.block_count,
            width=spec.model.width,
            context=spec.model.context,
            parameter_count=sum(
                workload.cost(layer).parameter_count for layer in range(workload.layer_count)
            ),
            tokens_per_step=spec.tokens_per_step,
            total_steps=spec.total_steps,
        )

    def view_took_over(self, spec: RunSpec, view: View, step: int) -> None:
        """From `step` on, `view` is in force."""
        self._names.learn(view.snapshot.records)
        self._tell_members(view)
        members = counted(len(view.members), "member")
        self._tell("view", f"view {view.id.number} from step {step} on: {members}")
        self._series.view_took_over(step)
        if self._contributions is not None:
            self._contributions.view_took_over(view, step)
        self._view = view
        self._committed_s = now.monotonic_s()
        if self._making is not None:
            self._making.cancel()
        before = points_of(self._view_state) or self._points
        self._making = asyncio.create_task(
            asyncio.to_thread(view_state, view, spec, self._peer_id, step, before)
        )
        self._making.add_done_callback(self._view_made)

    def _view_made(self, task: asyncio.Task[ViewState]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("the dashboard cannot show this view", exc_info=error)
            return
        self._view_state = task.result()

    def left_views(self) -> None:
        """The others go on without this peer: what it held, and with whom, is past. The next view's
        map resembles the last one."""
        if self._making is not None:
            self._making.cancel()
        if self._contributions is not None:
            self._contributions.left_views()
        self._points = points_of(self._view_state) or self._points
        self._view_state, self._timeline = ViewState(), Timeline()

    def _tell_members(self, view: View) -> None:
        before = set(self._view.member_ids) if self._view else set()
        after = set(view.member_ids)
        if self._view is not None:
            self._tell_each("joined", sorted(after - before), "part")
        self._tell_each("left", sorted(before - after), "part no more")

    def _tell_each(self, kind: str, peer_ids: list[str], what: str) -> None:
        """Of very many a few are told by name: else hundreds that come at once would be all of
        history."""
        for peer_id in peer_ids[:NAMES_TOLD]:
            self._tell(kind, f"{self._names.of(peer_id)} takes {what}")
        if (more := len(peer_ids) - NAMES_TOLD) > 0:
            takes = "takes" if more == 1 else "take"
            self._tell(kind, f"{counted(more, 'other')} {takes} {what}")

    def show_timeline(self, timeline: Timeline) -> None:
        """A step's bars."""
        self._timeline = timeline

    def tallies(self, contributions: Contributions) -> None:
        """What this peer gives to its run is counted there."""
        self._contributions = contributions
        self.seen.contribution = contributions.shown(self._names)

    def show_samples(self, samples: Samples) -> None:
        """What the model has written so far."""
        self.seen.samples = samples

    def ends_with(self, commands: tuple[str, ...]) -> None:
        """The run is complete: what can be typed next."""
        self._last_commands = commands

    def note(self, text: str) -> None:
        """Something worth a line of history."""
        self._tell("note", self._shown(text))

    def fault(self, text: str) -> None:
        """Something went wrong that is being dealt with."""
        self._tell("fault", self._shown(text))

    def step_committed(self, outcome: StepOutcome) -> None:
        """A step's outcome is known here."""
        self.seen.committed_count += outcome.loss is not None  # else a look at the model alone
        self._committed_s = now.monotonic_s()
        rate = self._status.figures().get("tokens_per_s")
        self._usual_rate = rate or self._usual_rate  # none with the last step before a view
        self._series.committed(outcome, rate)
        if self._contributions is not None and outcome.loss is not None:
            self._contributions.committed(outcome.step, *_moved_bytes(self._view_state))
            self._has_given_more = True

    def _shown(self, text: str) -> str:
        return shortened(self._names.in_text(text))

    def _tell(self, kind: str, text: str) -> None:
        self._events.add(Event(round(now.wall_s(), 3), kind, text))

    # what others read ----------------------------------------------------------------------------

    def state(self) -> DashboardState:
        """Everything; parts that have not changed are the same objects as before."""
        return DashboardState(
            live=self.live(),
            run=self._run,
            view=self._view_state,
            history=self._series.history(),
            timeline=self._timeline,
            samples=self.seen.samples,
            contribution=self.contribution(),
            events=self._events.newest_first(),
        )

    def contribution(self) -> ContributionBoard:
        """What this peer has given, and the board."""
        if self._contributions is not None and self._has_given_more:
            self._has_given_more = False
            self.seen.contribution = self._contributions.shown(self._names)
        return self.seen.given()

    def live(self) -> Live:
        """What changes from second to second."""
        facts, work = self._status.figures(), self._status.work
        step_ns = self._step_ns(facts.get("tokens_per_s"))
        return Live(
            time_s=round(now.wall_s(), 3),
            version=__version__,
            peer_id=self._peer_id,
            name=self._names.of(self._peer_id) if self._peer_id else "",
            state=self._status.state.value,
            reason=self._shown(self._status.reason),
            since_s=round(self._status.since_s, 3),
            step=self.step(),
            loss=facts.get("loss"),
            held_out_loss=facts.get("held_out_loss"),
            tokens_per_s=facts.get("tokens_per_s"),
            step_ns=step_ns,
            eta_s=facts.get("eta_s"),
            committed_here=self.seen.committed_count,
            undone_here=self.seen.undone_count,
            waits_for=tuple(facts.get("waits_for") or ()),
            next=tuple(self._next()),
            problems=tuple(self.problems()),
            worth=self._worth(facts.get("tokens_per_s")),
            heard_s_ago=self._heard(),
            silent_after_s=max(SILENT_S, 3 * (step_ns or 0) / 1e9),
            marks=self.marks,
            refused=self._refused(),
            this_machine=self.of_this_machine(),
            work=work.what if work else "",
            work_share=round(work.share, 4) if work else None,
            work_left_s=work.left_s if work else None,
        )

    def step(self) -> int:
        """Steps committed so far; a newcomer begins where the others are."""
        seen = self._status.facts.get("step")
        if seen is not None:  # of a view of its own: the others may have begun again at step 0
            return int(seen)
        known = self._agreement.step if self._agreement is not None else 0
        return int(known or self._told_step)

    def _worth(self, tokens_per_s: float | None) -> MeasuredWorth | None:
        """What this peer's coming changed; None for one that was there from the beginning."""
        if self._before is None or self._view_state.me is None:
            return None
        settled = tokens_per_s is not None and self._is_settled()
        before_tokens_per_s, before_members = self._before
        return MeasuredWorth(
            before_tokens_per_s=round(before_tokens_per_s, 1),
            before_members=before_members,
            now_tokens_per_s=tokens_per_s if settled else None,
            now_members=len(self._view_state.peers),
        )

    def _step_ns(self, rate: float | None) -> int | None:
        return int(self._run.tokens_per_step / rate * 1e9) if self._run and rate else None

    def _heard(self) -> tuple[float | None, ...]:
        if self._messenger is None:
            return ()
        return self.heard_s_ago([peer.peer_id for peer in self._view_state.peers])

    def heard_s_ago(self, peer_ids: Sequence[str]) -> tuple[float | None, ...]:
        """None for this peer, for one that was never heard, and for one that need not be heard. Of
        many members each hears its neighbours only, and that others say nothing to it means
        nothing."""
        if self._messenger is None or not peer_ids:
            return (None,) * len(peer_ids)
        now_s, heard = now.monotonic_s(), self._messenger.heard_s
        agreement = self._agreement
        near = agreement.watched if agreement is not None and agreement.view else set(peer_ids)
        return tuple(
            round(now_s - heard[peer_id], 1) if peer_id in heard and peer_id in near else None
            for peer_id in peer_ids
        )

    def _next(self) -> list[str]:
        agreement, spec = self._agreement, self._spec
        if agreement is None or spec is None:
            return []
        if self._status.state is State.DONE:
            return list(self._last_commands)
        found = []
        if agreement.next_view is not None:
            number = agreement.next_view.id.number
            found.append(f"view {number} takes over once all its members have their layers")
        elif agreement.attempting:
            found.append("the members are agreeing on a new view")
        step, saved = self.step(), (spec.checkpoint.every_steps, spec.audit.undo_every)
        if step >= spec.total_steps or self._status.state not in (State.TRAINING, State.SPARE):
            return found
        due = {
            "a held-out evaluation": _multiple_after(step, spec.evaluation.every_steps),
            "a checkpoint": _multiple_after(step, *saved),
            "the end of the run": spec.total_steps,
        }
        for what, at in sorted(due.items(), key=lambda item: item[1]):
            if at <= spec.total_steps:
                found.append(f"{what} after step {at:,}")
        return found

    def problems(self) -> list[Problem]:
        """What is wrong at this moment, and what to do about each."""
        status, agreement = self._status, self._agreement
        step_ns, troubles = self._step_ns(self._usual_rate), status.troubles.named()
        sight = Sight(
            state=status.state,
            reason=self._shown(status.reason),
            in_state_s=status.in_state_s,
            uncommitted_s=now.monotonic_s() - self._committed_s,
            step_s=step_ns / 1e9 if step_ns else None,
            predicted_s=self._view_state.predicted_step_ns / 1e9,
            is_only_member=len(self._view_state.peers) == 1,
            no_plan=self._view_state.no_plan,
            is_invited=self._spec is not None and self._spec.admission.is_invited,
            is_failing=agreement is not None and _is_failing(agreement),
            is_barred=any(name == BARRED for name, _, _ in troubles),
            lost=[self._names.of(peer_id) for peer_id in agreement.suspected] if agreement else (),
            waits_for=[self._names.of(peer_id) for peer_id in status.facts.get("waits_for") or ()],
            silent=self._silent(),
            **self._judged_by_few(),
            overdue=[(it.owner, it.place, it.waited_s) for it in self._overdue()],
        )
        told = [Problem(self._shown(what), fix, name) for name, what, fix in troubles]
        return [*problems_in(sight), *told]

    def _judged_by_few(self) -> dict[str, list[str]]:
        """Members that nobody audits, or one other member only, by the field of `Sight`."""
        view = self._agreement.view if self._agreement else None
        plan, spec = view.plan if view else None, self._spec
        if not isinstance(plan, Plan) or spec is None or not spec.audit.rate:
            return {}
        if plan.stage_holders() == (self._peer_id,):
            return {}  # it need not believe anybody
        arithmetics = self._status.facts.get("arithmetics") or {}
        judged = self._judges.found(plan, arithmetics, spec)
        return {field: [*map(self._names.of, peers)] for field, peers in judged.items()}

    def _silent(self) -> list[tuple[str, float]]:
        heard = zip(self._view_state.peers, self._heard(), strict=False)
        return [
            (self._names.of(peer.peer_id), ago_s)
            for peer, ago_s in heard
            if ago_s is not None and ago_s > UNHEARD_S
        ]


def _is_failing(agreement: Agreement) -> bool:
    """Whether this peer and its fellows deal with a failure."""
    return agreement.frozen and agreement.view is not None and not agreement.is_outside


def _moved_bytes(view: ViewState) -> tuple[int, int]:
    """What this peer sends in a step, and what it takes to guard others' layers."""
    sent = guarded = 0
    for flow in view.flows:
        sent += flow.there_bytes if flow.here == view.me else 0
        sent += flow.here_bytes if flow.there == view.me else 0
        guarded += flow.there_bytes if flow.there == view.me and flow.kind == "guard" else 0
    return sent, guarded


def shortened(text: str) -> str:
    """With peer ids cut to the part in which they differ, as in the addresses that hold them."""
    return PEER_ID.sub(lambda found: f"…{found[0][-6:]}", text)


def _multiple_after(step: int, *every: int) -> int:
    return min((step // each + 1) * each for each in every if each)


class _Warnings(logging.Handler):
    """Warnings of the log, as events: they tell what was, not what is wrong. A repeated one counts
    once, until there was none for a while: on another day it is another one."""

    def __init__(self, events: Events, shown: Callable[[str], str]) -> None:
        super().__init__(logging.WARNING)
        self._events = events
        self._shown = shown
        self._last: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = self._shown(record.getMessage())
        before = self._last.pop(text, None)
        if before is None or record.created - before >= ANOTHER_AFTER_S:
            self._events.add(Event(round(record.created, 3), "fault", text))
        self._last[text] = record.created
        while len(self._last) > EVENTS_LIMIT:
            del self._last[next(iter(self._last))]
