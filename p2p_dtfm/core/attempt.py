"""One attempt at a view: what has been gathered so far, and what follows from it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from p2p_dtfm.core.agreement_messages import (
    Accusation,
    Contribution,
    Gather,
    Ready,
    knowledge_digest,
)
from p2p_dtfm.core.leaving import staying
from p2p_dtfm.core.membership import mutually_reachable, unanswered, universe
from p2p_dtfm.core.mending import with_stand_ins
from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.records import PeerRecord
from p2p_dtfm.core.recovery import Recovery, recover
from p2p_dtfm.core.redo import Redo, redo_of
from p2p_dtfm.core.signed import Signed
from p2p_dtfm.core.snapshot import GENESIS, HeldLayer, Member, Snapshot, ViewId, sorted_records
from p2p_dtfm.core.workload import Workload

OpenRecord = Callable[[Signed], PeerRecord]


@dataclass
class Attempt:
    """`known` holds contributions as signed, `opened` the same ones decoded."""

    me: Member
    number: int
    planned: bool
    base: ViewId
    layer_count: int
    progress_ns: int
    sent_ns: int
    round: int = 0
    known: dict[Member, Signed] = field(default_factory=dict)
    opened: dict[Member, Contribution] = field(default_factory=dict)
    joiners: dict[Member, tuple[Member, ...]] = field(default_factory=dict)
    absent: set[Member] = field(default_factory=set)
    accusations: set[Accusation] = field(default_factory=set)
    digests: dict[Member, tuple[int, str]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    """Who was sent this peer's contribution."""
    heard_ns: dict[Member, int] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    view_id: ViewId | None = None
    """Of the snapshot."""
    recovery: Recovery | None = None
    plan: Plan | NoPlan | None = None
    ready: dict[Member, Ready] = field(default_factory=dict)
    taken_over_elsewhere: bool = False
    """Another member is active in this very view already: all have said Ready."""
    _cache: dict[str, tuple[object, object]] = field(default_factory=dict)

    def add(self, signed: Signed, contribution: Contribution, open_record: OpenRecord) -> None:
        member = contribution.member
        records = [open_record(joiner) for joiner in contribution.joiners]
        self.opened[member] = contribution
        self.known[member] = signed
        self.joiners[member] = tuple(Member(r.peer_id, r.life) for r in records)

    def learn(self, message: Gather) -> bool:
        """Merge evidence; True if there was news."""
        news = set(message.absent) - self.absent, set(message.accusations) - self.accusations
        self.absent |= news[0]
        self.accusations |= news[1]
        return any(news)

    @property
    def digest(self) -> str:
        return knowledge_digest(self.number, self.known, self.absent, self.accusations)

    @property
    def universe(self) -> frozenset[Member]:
        """All who must answer."""
        held = self._cache.get("universe")
        if held is None or held[0] != len(self.opened):
            named = universe(self.opened, self.joiners)
            held = self._cache["universe"] = (len(self.opened), named)
        assert isinstance(held[1], frozenset)
        return held[1]

    @property
    def awaited_ids(self) -> frozenset[str]:
        """Peer ids of all who must answer."""
        named = self.universe
        held = self._cache.get("awaited_ids")
        if held is None or held[0] is not named:
            held = self._cache["awaited_ids"] = (named, frozenset(m.peer_id for m in named))
        assert isinstance(held[1], frozenset)
        return held[1]

    @property
    def snapshot_ids(self) -> frozenset[str]:
        """Peer ids of those whose knowledge the snapshot is."""
        held = self._cache.get("snapshot_ids")
        if held is None or held[0] is not self.snapshot:
            members = self.snapshot.contributors if self.snapshot is not None else ()
            held = self._cache["snapshot_ids"] = (
                self.snapshot,
                frozenset(m.peer_id for m in members),
            )
        assert isinstance(held[1], frozenset)
        return held[1]

    @property
    def others(self) -> tuple[str, ...]:
        """Whom to send to."""
        return tuple(sorted(m.peer_id for m in self.universe if m.peer_id != self.me.peer_id))

    @property
    def waits_for(self) -> set[Member]:
        """Whose contribution is still waited for."""
        return unanswered(self.universe, self.known, self.absent, self.accusations)

    @property
    def participants(self) -> tuple[Member, ...]:
        """Those of the contributors that can be in one view together."""
        sizes = len(self.opened), len(self.accusations)
        held = self._cache.get("participants")
        if held is None or held[0] != sizes:
            heard = {m: self.opened[m] for m in self.universe if m in self.opened}
            chosen = mutually_reachable(heard, self.accusations, self._reached_step)
            held = self._cache["participants"] = (sizes, chosen)
        assert isinstance(held[1], tuple)
        return held[1]

    def _reached_step(self, parts: list[Contribution]) -> int:
        target = recover(parts, self.layer_count).target
        return -1 if target is None else target.step

    @property
    def only_newcomers(self) -> bool:
        return all(part.present is None for part in self.opened.values())

    def same_as(self, peer_ids: Iterable[str]) -> tuple[str, ...]:
        """Those of the peers that are known to know what this peer knows."""
        mine = self.digests[self.me][1]
        same = {m.peer_id for m in self.universe if self.digests.get(m, (0, ""))[1] == mine}
        return tuple(peer_id for peer_id in peer_ids if peer_id in same)

    @property
    def kept_out(self) -> tuple[Member, ...]:
        """Those that asked to be let in, or answered, and yet are no participants."""
        asked = {joiner for joiners in self.joiners.values() for joiner in joiners}
        return tuple(sorted((asked | set(self.opened)) & self.universe - set(self.participants)))

    def gather(self, contributions: bool = True) -> Gather:
        """What to send; without the contributions to those that have them or will soon."""
        return Gather(
            sender=self.me,
            number=self.number,
            planned=self.planned,
            base=self.base,
            round=self.round,
            contributions=tuple(self.known[member] for member in sorted(self.known))
            if contributions
            else (),
            absent=tuple(sorted(self.absent)),
            digest=self.digests[self.me][1],
            accusations=tuple(sorted(self.accusations)),
        )

    @property
    def settled(self) -> bool:
        """Every participant knows the same, and nobody else is waited for."""
        if self.waits_for:
            return False
        mine = self.digests[self.me][1]
        return all(self.digests.get(m, (0, ""))[1] == mine for m in self.participants)

    def redo(self) -> Redo | None:
        """What an unplanned view keeps of the step that was under way."""
        if self.recovery is None or self.recovery.target is None:
            return None
        if not isinstance(self.plan, Plan):
            return None
        return redo_of(self.plan, self.recovery.target, self._counted)

    def chosen(self, planned: Plan | NoPlan) -> Plan | NoPlan:
        """The plan of the view: `planned`, or one in which replicas stand in for who is lost."""
        target = self.recovery.target if self.recovery is not None else None
        if self.planned or target is None or isinstance(planned, NoPlan):
            return planned
        assert self.snapshot is not None
        return with_stand_ins(self.snapshot, planned, target, self._counted)

    @property
    def _counted(self) -> list[Contribution]:
        """Those that the snapshot counts."""
        assert self.snapshot is not None
        return [self.opened[member] for member in self.snapshot.contributors]

    def freeze(self, run_digest: str, workload: Workload, open_record: OpenRecord) -> Snapshot:
        """The snapshot that the gathered knowledge comes to."""
        parts = [self.opened[member] for member in self.participants]
        records = [open_record(part.record) for part in parts]
        present = [part.present for part in parts if part.present is not None]
        newest = max(present, key=lambda item: item.view, default=None)
        plan = newest.plan if newest else None
        step, held = max(part.step for part in parts), _held(parts)
        if not self.planned:
            self.recovery = recover(parts, self.layer_count)
            if self.recovery.target is not None:
                step, held = self.recovery.target.step, _held_at(self.recovery)
        target = self.recovery.target if self.recovery is not None else None
        missing = self.universe - set(self.participants)
        self.snapshot = Snapshot(
            run_digest=run_digest,
            workload=workload,
            number=self.number,
            previous=self.base if self.planned else (newest.view if newest else GENESIS),
            planned=self.planned,
            records=sorted_records(staying(records, self.planned, plan, held, bool(missing))),
            contributors=self.participants,
            absent=tuple(sorted(missing)),
            step=step,
            held=held,
            present=plan,
            knowledge=self.digests[self.me][1],
            lineage=target.lineage if target is not None else "",
            lost_layers=self.recovery.lost_layers if self.recovery is not None else (),
        )
        self.view_id = self.snapshot.view_id
        return self.snapshot


def _held(parts: list[Contribution]) -> tuple[HeldLayer, ...]:
    return tuple(
        HeldLayer(part.member.peer_id, layer, version)
        for part in parts
        for layer, version in sorted(part.held.items())
    )


def _held_at(recovery: Recovery) -> tuple[HeldLayer, ...]:
    assert recovery.target is not None
    return tuple(
        HeldLayer(member.peer_id, layer, recovery.target.step)
        for member, layers in sorted(recovery.held.items())
        for layer in layers
    )
