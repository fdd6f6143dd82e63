"""Watches one daemon for its dashboard, terminal and metrics; nothing of it reaches training."""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable

from p2p_dtfm import __version__
from p2p_dtfm.core.agreement import Agreement
from p2p_dtfm.core.run_spec import RunSpec
from p2p_dtfm.core.step import StepOutcome
from p2p_dtfm.core.view import View
from p2p_dtfm.core.workload import Workload
from p2p_dtfm.daemon.courier import Courier
from p2p_dtfm.daemon.series import Series
from p2p_dtfm.daemon.status import State, Status
from p2p_dtfm.daemon.view_facts import points_of, view_state
from p2p_dtfm.web.state import (
    DashboardState,
    Event,
    Live,
    Problem,
    Refused,
    RunFacts,
    Timeline,
    ViewState,
)

EVENTS_LIMIT = 200
WARNINGS_SHOWN = 5
WARNING_SHOWN_S = 120.0
LATE_STEPS = 5
LATE_S = 10.0
"""A step is late after this time and this many times what steps took of late."""
SILENT_S = 10.0

log = logging.getLogger("p2p_dtfm")


class Observer:
    """`state()` is cheap: what changes seldom is made once and kept."""

    def __init__(self, status: Status, seen: "Seen | None" = None) -> None:
        self.marks: tuple[str, ...] = ()
        self._status = status
        self._timeline = Timeline()
        self._peer_id = ""
        self._courier: Courier | None = None
        self._refused: Callable[[], tuple[Refused, ...]] = tuple
        self._agreement: Agreement | None = None
        self._spec: RunSpec | None = None
        self._run: RunFacts | None = None
        self._view: View | None = None
        self._view_state = ViewState()
        self._making: asyncio.Task[ViewState] | None = None
        self.seen = seen or Seen()
        self._series = self.seen.series
        self._events = self.seen.events
        self._committed_s = time.monotonic()
        self._warnings = _Warnings(self._events)
        log.addHandler(self._warnings)

    def close(self) -> None:
        log.removeHandler(self._warnings)
        if self._making is not None:
            self._making.cancel()

    # what the daemon tells -----------------------------------------------------------------------

    def guarded_by(self, refused: Callable[[], tuple[Refused, ...]]) -> None:
        """What the gate of this daemon has turned away."""
        self._refused = refused

    def meets(self, courier: Courier) -> None:
        """The daemon has an identity and can be spoken to."""
        self._peer_id = courier.me
        self._courier = courier

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

    def view_took_over(self, view: View, step: int) -> None:
        """From `step` on, `view` is in force."""
        assert self._spec is not None
        self._tell_members(view)
        plural = "" if len(view.members) == 1 else "s"
        self._tell(
            "view", f"view {view.id.number} from step {step} on: {len(view.members)} member{plural}"
        )
        self._series.view_took_over(step)
        self._view = view
        self._committed_s = time.monotonic()
        if self._making is not None:
            self._making.cancel()
        before = points_of(self._view_state)
        self._making = asyncio.create_task(
            asyncio.to_thread(view_state, view, self._spec, self._peer_id, step, before)
        )
        self._making.add_done_callback(self._view_made)

    def _view_made(self, task: asyncio.Task[ViewState]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("the dashboard cannot show this view", exc_info=error)
            return
        self._view_state = task.result()

    def _tell_members(self, view: View) -> None:
        before = set(self._view.member_ids) if self._view else set()
        after = set(view.member_ids)
        for peer_id in sorted(after - before):
            if self._view is not None:
                self._tell("joined", f"{shortened(peer_id)} takes part")
        for peer_id in sorted(before - after):
            self._tell("left", f"{shortened(peer_id)} takes part no more")

    def show_timeline(self, timeline: Timeline) -> None:
        """A step's bars."""
        self._timeline = timeline

    def note(self, text: str) -> None:
        """Something worth a line of history."""
        self._tell("note", shortened(text))

    def fault(self, text: str) -> None:
        """Something went wrong that is being dealt with."""
        self._tell("fault", shortened(text))

    def step_committed(self, outcome: StepOutcome) -> None:
        """A step's outcome is known here."""
        self.seen.committed_count += 1
        self._committed_s = time.monotonic()
        self._series.committed(outcome, self._status.facts.get("tokens_per_s"))

    def _tell(self, kind: str, text: str) -> None:
        self._events.add(Event(round(time.time(), 3), kind, text))

    # what others read ----------------------------------------------------------------------------

    def state(self) -> DashboardState:
        """Everything; parts that have not changed are the same objects as before."""
        return DashboardState(
            live=self.live(),
            run=self._run,
            view=self._view_state,
            history=self._series.history(),
            timeline=self._timeline,
            events=self._events.newest_first(),
        )

    def live(self) -> Live:
        """What changes from second to second."""
        facts = self._status.facts
        step_ns, work = self._step_ns(), self._status.work
        return Live(
            time_s=round(time.time(), 3),
            version=__version__,
            peer_id=self._peer_id,
            state=self._status.state.value,
            reason=shortened(self._status.reason),
            since_s=round(self._status.since_s, 3),
            step=self._step(),
            loss=facts.get("loss"),
            held_out_loss=facts.get("held_out_loss"),
            tokens_per_s=facts.get("tokens_per_s"),
            step_ns=step_ns,
            eta_s=facts.get("eta_s"),
            committed_here=self.seen.committed_count,
            waits_for=tuple(facts.get("waits_for") or ()),
            next=tuple(self._next()),
            problems=tuple(self._problems(step_ns)),
            heard_s_ago=self._heard(),
            silent_after_s=max(SILENT_S, 3 * (step_ns or 0) / 1e9),
            marks=self.marks,
            refused=self._refused(),
            work=work.what if work else "",
            work_share=round(work.share, 4) if work else None,
            work_left_s=work.left_s if work else None,
        )

    def _step(self) -> int:
        """Committed so far; a newcomer begins where the others are."""
        known = self._agreement.step if self._agreement is not None else 0
        return self._status.facts.get("step") or known

    def _step_ns(self) -> int | None:
        rate = self._status.facts.get("tokens_per_s")
        return int(self._run.tokens_per_step / rate * 1e9) if self._run and rate else None

    def _heard(self) -> tuple[float | None, ...]:
        if self._courier is None:
            return ()
        now_s, heard = time.monotonic(), self._courier.heard_s
        return tuple(
            round(now_s - heard[peer.peer_id], 1) if peer.peer_id in heard else None
            for peer in self._view_state.peers
        )

    def _next(self) -> list[str]:
        agreement, spec = self._agreement, self._spec
        if agreement is None or spec is None:
            return []
        found = []
        if agreement.next_view is not None:
            number = agreement.next_view.id.number
            found.append(f"view {number} takes over once all its members have their layers")
        elif agreement.attempting:
            found.append("the members are agreeing on a new view")
        step = self._step()
        if step >= spec.total_steps or self._status.state not in (State.TRAINING, State.SPARE):
            return found
        due = {
            "a held-out evaluation": _multiple_after(step, spec.evaluation.every_steps),
            "a checkpoint": _multiple_after(step, spec.checkpoint.every_steps),
            "the end of the run": spec.total_steps,
        }
        for what, at in sorted(due.items(), key=lambda item: item[1]):
            if at <= spec.total_steps:
                found.append(f"{what} after step {at}")
        return found

    def _problems(self, step_ns: int | None) -> list[Problem]:
        found = []
        if self._view_state.no_plan:
            found.append(
                Problem(self._view_state.no_plan, "training goes on as soon as peers suffice")
            )
        late_s = time.monotonic() - self._committed_s
        training = self._status.state is State.TRAINING
        if training and late_s > max(LATE_S, LATE_STEPS * (step_ns or 0) / 1e9):
            waits_for = self._status.facts.get("waits_for") or ()
            whom = ", ".join(map(shortened, waits_for)) or "tensors of its neighbours"
            found.append(
                Problem(
                    f"no step was committed for {int(late_s)} s: this peer waits for {whom}",
                    "see whether those computers and their connections are well",
                )
            )
        return found + self._warnings.recent()


def shortened(text: str) -> str:
    """With peer ids cut to the part in which they differ."""
    return _PEER_ID.sub(lambda found: f"…{found[0][-6:]}", text)


_PEER_ID = re.compile(r"\b(?:12D3KooW[1-9A-HJ-NP-Za-km-z]{44}|Qm[1-9A-HJ-NP-Za-km-z]{44})\b")


def _multiple_after(step: int, every: int) -> int:
    return (step // every + 1) * every


class Seen:
    """What outlasts a pause: the daemon that follows on the same home goes on with it."""

    def __init__(self) -> None:
        self.series = Series()
        self.events = Events()
        self.committed_count = 0


class Events:
    """The latest, as one object until another comes."""

    def __init__(self) -> None:
        self._held: deque[Event] = deque(maxlen=EVENTS_LIMIT)
        self._made: tuple[Event, ...] | None = ()

    def add(self, event: Event) -> None:
        self._held.append(event)
        self._made = None

    def newest_first(self) -> tuple[Event, ...]:
        if self._made is None:
            self._made = tuple(reversed(self._held))
        return self._made


class _Warnings(logging.Handler):
    """Warnings of the log, as events and for a while as problems. A repeated one counts once."""

    def __init__(self, events: Events) -> None:
        super().__init__(logging.WARNING)
        self._events = events
        self._last: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = shortened(record.getMessage())
        if text not in self._last:
            self._events.add(Event(round(record.created, 3), "fault", text))
        self._last[text] = record.created
        while len(self._last) > EVENTS_LIMIT:
            del self._last[next(iter(self._last))]

    def recent(self) -> list[Problem]:
        """Those of the last minutes, newest first."""
        now_s = time.time()
        fresh = [text for text, at_s in self._last.items() if now_s - at_s < WARNING_SHOWN_S]
        return [Problem(text) for text in reversed(fresh[-WARNINGS_SHOWN:])]
