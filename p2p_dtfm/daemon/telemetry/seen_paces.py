"""How slow other peers are seen to compute, by when what they owe this one comes: for the record.

That can be told apart from what a line does only where a peer computes the whole model by itself.
Then its first gradients come when it has gone through all its microbatches but a part of the last,
and on a line whose rate is known. Where nobody else has a stage, its steps take what it takes. In a
pipeline nobody alone knows for whom another one has waited.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, median

from p2p_dtfm.core.audit.believed_speeds import pace_of
from p2p_dtfm.core.cost_model.links.swarm_links import SwarmLinks
from p2p_dtfm.core.cost_model.tables.link_tables import duration_ns
from p2p_dtfm.core.planner.recomputation import stage_work_ns
from p2p_dtfm.core.protocol.facts.seen_paces import LONGEST_PACE_NS, PACES_LIMIT
from p2p_dtfm.core.protocol.measured_plans import STEPS_ENOUGH
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Link
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.ports import now

SLOW_PERCENT = 150
"""In percent of what its record says: a peer that takes more is told of, where steps take longer
than planned as well."""
STILL_PERCENT = 120
"""A peer that was told of is told of until it takes less than this."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 600.0
"""A slow peer that has nothing to compute any more is told of for so long, and then it may try
again. The pause is twice as long each further time that it was slow.

So a peer whose machine was busy is slow for a minute, or for as long as it was busy, and for ten
minutes at most. Where forty steps take longer it is slow for these: in them others show what they
do without it.
"""
PAUSE_STEPS = 40
NOTABLE_PERCENT = 125
COUNTED_LIMIT = 256


@dataclass
class _Seen:
    """One peer in one view."""

    planned_ns: int
    """What all its microbatches take, by its record."""
    pace_ns: int
    """Its pace, as its record says."""
    link: Link
    """Its link to this peer."""
    copies: int
    """To how many others it sends as much at the same time; 0 if it alone has stages."""
    steps_ns: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_ENOUGH))

    def add(self, took_ns: int, size_bytes: int) -> None:
        way_ns = self.link.round_trip_ns
        way_ns += duration_ns(self.copies * size_bytes, self.link.bytes_per_s)
        self.steps_ns.append(max(0, took_ns - way_ns))

    @property
    def percent(self) -> int | None:
        """What it takes, in percent of what it says of itself; None before enough steps were seen.
        A peer that computes alone may tell of several steps at once."""
        if len(self.steps_ns) < STEPS_ENOUGH:
            return None
        middle = median(self.steps_ns) if self.copies else mean(self.steps_ns)
        return 100 * int(middle) // self.planned_ns


def pace_text(peer_id: str, seen_ns: int | None) -> str:
    """For the log. `seen_ns`: there and back through one layer of each kind; None if it is as fast
    as it says again."""
    if seen_ns is None:
        return f"{peer_id} is as fast as it says again, as seen here"
    taken = f"{seen_ns / 1e6:.1f} ms for a layer of each kind"
    return f"{peer_id} is slower than it says, as seen here: it takes {taken}"


class SeenPaces:
    """The paces that this process has seen. Call `took_over` with each view, `begins` and
    `committed` with each step, `came` with each part of a gradient; `look` now and then."""

    def __init__(self, me: str, clock_ns: Callable[[], int] = now.monotonic_ns) -> None:
        self._me = me
        self._clock_ns = clock_ns
        self._seen: dict[str, _Seen] = {}
        self._step = -1
        self._begun_ns = 0
        self._alone = ""
        """The peer that has all stages, where this one has none."""
        self._planned_s = 0.0
        """What a step takes by the plan in force."""
        self._came: dict[str, tuple[int, int]] = {}
        """By sender, in the step under way: when its first part came, and the part's size."""
        self._told: dict[str, tuple[int, int]] = {}
        """The pace of each peer that is told of, and when it was seen last."""
        self._times: Counter[str] = Counter()
        """How often each peer was slow."""
        self._better: set[str] = set()
        """Peers that were told of and are not any more."""

    def took_over(self, view: View) -> None:
        plan = view.plan
        self._seen, self._came, self._step, self._alone = {}, {}, -1, ""
        self._planned_s = plan.predicted_step_ns / 1e9 if isinstance(plan, Plan) else 0.0
        if not isinstance(plan, Plan) or plan.stand_ins or plan.provisional:
            return
        if plan.stage_of(self._me) is not None:
            self._seen = _measurable(view, plan, self._me)
        elif len(plan.stage_holders()) == 1:
            (self._alone,) = plan.stage_holders()
            record = view.snapshot.record(self._alone)
            planned_ns = max(plan.predicted_step_ns, _work_ns(view, plan, self._alone))
            pace_ns = pace_of(record.device, view.snapshot.workload)
            self._seen = {self._alone: _Seen(planned_ns, pace_ns, Link(0, 1), 0)}

    def begins(self, step: int) -> None:
        """This peer begins to compute `step`, as the others do: all have seen the last one
        commit."""
        if step != self._step:
            self._step, self._begun_ns, self._came = step, self._clock_ns(), {}

    def came(self, sender: str, step: int, size_bytes: int) -> None:
        """A part of a sender's gradient has come."""
        if step == self._step and sender in self._seen and sender not in self._came:
            self._came[sender] = self._clock_ns() - self._begun_ns, size_bytes

    def committed(self) -> None:
        """A step of the view is committed."""
        if self._alone:
            now_ns, before_ns, self._begun_ns = self._clock_ns(), self._begun_ns, self._clock_ns()
            if self._step >= 0:  # the first one was begun who knows when
                self._seen[self._alone].add(now_ns - before_ns, 0)
            self._step = 0
        for sender, (took_ns, size_bytes) in self._came.items():
            self._seen[sender].add(took_ns, size_bytes)
        self._came = {}

    def look(self, is_late: bool) -> None:
        """`is_late`: steps take longer than planned, so that somebody is slower than it says."""
        now_ns = self._clock_ns()
        for peer_id, seen in self._seen.items():
            percent, is_told = seen.percent, peer_id in self._told
            if percent is None:
                continue
            if percent >= (STILL_PERCENT if is_told else SLOW_PERCENT) and (is_told or is_late):
                self._tell(peer_id, seen.pace_ns * percent // 100, now_ns)
            elif is_told:
                self._forget(peer_id)
        for peer_id in sorted(self._told.keys() - self._seen.keys()):
            if now_ns - self._told[peer_id][1] >= self._pause_s(peer_id) * 1e9:
                self._forget(peer_id)

    def told(self) -> dict[str, int]:
        """The slowest peers and their paces, for this peer's record."""
        order = sorted(self._told, key=lambda peer_id: (-self._told[peer_id][0], peer_id))
        return {peer_id: self._told[peer_id][0] for peer_id in sorted(order[:PACES_LIMIT])}

    def improved_peers(self, slow: dict[str, int]) -> list[str]:
        """Peers that the plan in force takes to be slow, and that are not any more as seen here."""
        return sorted(self._better & slow.keys())

    def _tell(self, peer_id: str, pace_ns: int, now_ns: int) -> None:
        before_ns = self._told.get(peer_id, (0, 0))[0]
        if not before_ns:
            self._times[peer_id] += 1
            for known in sorted(self._times.keys() - self._told.keys())[COUNTED_LIMIT:]:
                del self._times[known]
        pace_ns = min(pace_ns, LONGEST_PACE_NS)
        slower, faster = max(pace_ns, before_ns), min(pace_ns, before_ns)
        is_other = 100 * slower > NOTABLE_PERCENT * faster
        self._told[peer_id] = (pace_ns if is_other else before_ns), now_ns
        self._better.discard(peer_id)

    def _forget(self, peer_id: str) -> None:
        del self._told[peer_id]
        if len(self._better) < COUNTED_LIMIT:
            self._better.add(peer_id)

    def _pause_s(self, peer_id: str) -> float:
        return pause_s(self._times[peer_id], self._planned_s)


def pause_s(times: int, step_s: float = 0.0) -> float:
    """Seconds for which a peer without work keeps its slow pace: doubles with each of its `times`
    slowdowns up to a limit, and is at least `PAUSE_STEPS` steps of `step_s`."""
    by_clock_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(max(0, times - 1), 10))
    return max(by_clock_s, PAUSE_STEPS * step_s)


def _measurable(view: View, plan: Plan, me: str) -> dict[str, _Seen]:
    """The peers that have all layers, and send this peer their parts."""
    records = {record.peer_id: record for record in view.snapshot.records}
    links = SwarmLinks(view.snapshot.records)
    found = {}
    for pipeline in plan.pipelines:
        peer_id = pipeline.stages[0].peer_id
        if len(pipeline.stages) == 1 and peer_id != me and pipeline.microbatch_count:
            rate, round_trip_ns = links.flow(records[peer_id], records[me])
            found[peer_id] = _Seen(
                _work_ns(view, plan, peer_id),
                pace_of(records[peer_id].device, view.snapshot.workload),
                Link(round_trip_ns, rate),
                len(plan.pipelines) - 1,
            )
    return found


def _work_ns(view: View, plan: Plan, peer_id: str) -> int:
    """How long a peer that has all layers computes in a step, by its record."""
    device = view.snapshot.record(peer_id).device
    return max(1, stage_work_ns(view.snapshot, plan, peer_id, device))
