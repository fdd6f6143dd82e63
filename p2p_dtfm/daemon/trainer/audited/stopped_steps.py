"""What this peer has heard of the step under way, in views that ended before the step was committed
(`core.audit.earlier_claims`)."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from p2p_dtfm.core.audit.boundaries import TRAINING
from p2p_dtfm.core.audit.claim_book import ClaimBook
from p2p_dtfm.core.audit.earlier_claims import ALL_ALIKE, Alike, StoppedStep
from p2p_dtfm.core.commit.step_terms import StepTerms, terms_of
from p2p_dtfm.core.messages.audit_messages import Claimed
from p2p_dtfm.core.messages.work import Lack
from p2p_dtfm.core.planner.wire_plan import WirePlan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.partial_replay import whole_step
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.step.neighbours import held_out_judged
from p2p_dtfm.daemon.step.stage_account import Judge
from p2p_dtfm.daemon.trainer.step_shards import StepShards
from p2p_dtfm.daemon.trainer.trainer_state import Tools
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.ports import now
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replay.arithmetic import max_threads

KEPT_LIMIT = 4
"""How many views of one step are kept: the last ones, and in any case the first, which had taken
steps before. In the others all works are audited; but colluders may have these views stopped as
well, until the lie would be forgotten."""
LATE_S = 1.0
LATE_STEPS = 12
"""No more works are begun after this time and this many steps together: a peer like the others is
through with all of them by then."""
DENIED, NOT_DENIED = b"denied", b""


class LateWork(NamedTuple):
    """A work of a stopped step that nobody has computed again."""

    peer_id: str
    stopped: StoppedStep
    wire: WirePlan


class StoppedSteps:
    """Call `begins` with each step, and `view_is_over` with each book that is laid down."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._under_way: tuple[str, WirePlan] | None = None
        self._stopped: list[tuple[StoppedStep, WirePlan]] = []
        self._begun = 0
        """Steps begun in the view in force."""
        self._lives: Mapping[str, int] = {}
        """The lives of that view's members."""

    @cached_property
    def _terms(self) -> StepTerms:
        return terms_of(self._tools.spec)

    def view_is_over(self, book: ClaimBook | None) -> None:
        if book is not None and self._under_way is not None:
            base, wire = self._under_way
            stopped = book.stopped(self._tools.me, base)
            stopped = replace(stopped, was_drawn=self._begun > 1, lives=self._lives)
            self._stopped.append((stopped, wire))
            self._begun = 0

    def begins(self, step: int, base: str, wire: WirePlan, members: Iterable[Member]) -> None:
        """`members` are those of the view in force."""
        self._begun += 1
        self._lives = {member.peer_id: member.life for member in members}
        again = [it for it in self._stopped if it[0].is_done_again(step, base)]
        again.sort(key=lambda it: it[0].was_drawn)
        self._stopped, self._under_way = again[-KEPT_LIMIT:], (base, wire)

    def _alike(self, plan: Plan, stopped: StoppedStep, wire: WirePlan) -> Alike | None:
        """What is alike between two views; None if their pipelines differ. Chunks and codecs may
        differ even so: they depend on the links that members tell of, too."""
        if stopped.plan.pipelines != plan.pipelines or self._under_way is None:
            return None
        now_wire = self._under_way[1]
        return Alike(wire.chunks == now_wire.chunks, wire.boundaries == now_wire.boundaries)

    def changed(self, plan: Plan, claims: Mapping[str, Claimed]) -> list[str]:
        """Members whose work was another before."""
        found = set[str]()
        for stopped, wire in self._stopped:
            alike = self._alike(plan, stopped, wire)
            if alike is not None:
                # parameters are compared with those of the step's first view only
                since = [it.plan for it, _ in self._stopped if it is not stopped]
                got_states = stopped.got_states(plan, self._lives, since)
                found |= set(stopped.changed(claims, alike, got_states))
        return sorted(found)

    def excused(self, plan: Plan, claims: Mapping[str, Claimed]) -> dict[str, str]:
        """Members that say that something else came to them then than now, each with the sender."""
        found = dict[str, str]()
        for stopped, wire in self._stopped:
            alike = self._alike(plan, stopped, wire)
            found |= stopped.excused(claims, alike) if alike is not None else {}
        return found

    def sent_other(self) -> set[str]:
        """Members that had claimed something else in a stopped step than had come from them."""
        return {it for stopped, _ in self._stopped for it in stopped.sent_other()}

    def unjudged(
        self,
        view: View,
        plan: Plan,
        claims: Mapping[str, Claimed],
        barred: Collection[str],
        layers: Collection[int],
    ) -> Iterator[LateWork]:
        """Works whose `layers` are here, as many as there is time for. Each is to be judged before
        the next one is asked for. A peer that computes a quarter of what the others do has as
        little of a step. For a work of theirs it would take four times as long, while they wait for
        its word."""
        ends_s = now.monotonic_s() + LATE_S + LATE_STEPS * plan.predicted_step_ns / 1e9
        for stopped, wire in self._stopped:
            if self._alike(plan, stopped, wire) == ALL_ALIKE:
                due = stopped.in_other_ways(claims, barred)
            else:
                due = stopped.unjudged(plan, barred, view.id.snapshot)
            for peer_id in due:
                if now.monotonic_s() > ends_s:
                    return
                if set(layers).issuperset(stopped.plan.layers_of(peer_id)):
                    yield LateWork(peer_id, stopped, wire)

    def shards_of(self, it: LateWork) -> StepShards:
        stopped = it.stopped
        trains = self._terms.trains(stopped.step)
        microbatches = whole_step(stopped.plan, it.peer_id).microbatches if trains else ()
        return StepShards(stopped.step, microbatches, bool(self._held_out(it)), it.peer_id)

    def _held_out(self, it: LateWork) -> list[int]:
        stopped = it.stopped
        if not self._terms.evaluates(stopped.step):
            return []
        due = self._terms.due(stopped.step, stopped.plan) or TRAINING
        return held_out_judged(stopped.plan, it.peer_id, self._tools.spec, due)

    async def judged(self, it: LateWork, states: Mapping[int, LayerState]) -> bytes:
        """`DENIED` if a peer's work comes to something else here than the peer has claimed, or
        sent."""
        tools, stopped, peer_id = self._tools, it.stopped, it.peer_id
        threads = stopped.ways[peer_id].threads
        if threads > max_threads():  # nobody with this arithmetic computes so
            return DENIED
        judge = Judge(tools.spec, stopped.plan, it.wire, states, tools.compute, _nothing_came)
        theirs, own = await judge.own_work(
            peer_id,
            self.shards_of(it).microbatches,
            tools.batches,
            stopped.step,
            threads,
            held_out=self._held_out(it),
            due=self._terms.due(stopped.step, stopped.plan) or TRAINING,
        )
        is_denied = stopped.denies(peer_id, own, theirs.parts, theirs.losses)
        return DENIED if is_denied else NOT_DENIED


async def _nothing_came(due: Lack, blob: str, size_bytes: int) -> bytes:
    """A stage that is the whole model needs nothing from others."""
    raise BlobUnavailable(blob, {})
