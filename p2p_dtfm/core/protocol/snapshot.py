"""The snapshot: the roster frozen for one view, with everything else that the plan depends on."""

from collections.abc import Iterable

import msgspec

from p2p_dtfm.core.protocol.canonical import digest, encode
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.workload import Workload


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """A peer in one of its lives."""

    peer_id: str
    life: int


def names_of(members: Iterable[Member]) -> str:
    """The members' peer ids in words, sorted."""
    return ", ".join(sorted(member.peer_id for member in members))


class ViewId(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """Names a view. Two halves of a split swarm may share a number, never an id."""

    number: int
    snapshot: str

    def __str__(self) -> str:
        return f"{self.number}:{self.snapshot[:12]}"


GENESIS = ViewId(0, "")
"""The view before the first one."""


class HeldLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """A peer has the state of a layer after `version` committed steps."""

    peer_id: str
    layer: int
    version: int


class Bar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, order=True):
    """A peer's bar: more than half of the stage-holders of `view` found that its work in `step` was
    not what it claimed.

    `count` is the number of such verdicts. The peer has no place until the bar ends, which `step`
    and `count` say (`core.membership.bars`), and no stage until `until_step`, or a little later.

    Without a verdict (`count` 0, `view` `GENESIS`) the entry says that the key is known since
    `step`, and has no stage until `until_step` (`core.audit.roles`).
    """

    view: ViewId
    step: int
    peer_id: str
    count: int
    until_step: int
    reason: str


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal snapshots have equal bytes, and equal bytes have equal plans.

    `records` holds the members of the new view, sorted by peer id. `step` is the step from which an
    unplanned view goes on; for a planned one, the highest that any contributor had reached.
    `present` is the plan from which planning starts: the one in force now or until a failure, or
    None.
    """

    run_digest: str
    workload: Workload
    number: int
    previous: ViewId
    planned: bool
    records: tuple[PeerRecord, ...]
    contributors: tuple[Member, ...]
    absent: tuple[Member, ...]
    step: int
    present: Plan | None
    held: tuple[HeldLayer, ...] = ()
    """The states that contributors had when they entered Gather, sorted. For an unplanned view, the
    ones that they have at `step`, once they have rolled forward what they can."""
    knowledge: str = ""
    """Digest of all that was gathered: two views of different knowledge never share an id."""
    lineage: str = ""
    """The lineage of the states that an unplanned view starts from, at `step`."""
    lost_layers: tuple[int, ...] = ()
    """Layers that nobody holds: there is no plan before someone brings them."""
    bars: tuple[Bar, ...] = ()
    """Bars that are over or in force, and entries that say since when keys are known. Sorted."""

    def digest(self) -> str:
        return digest(self)

    def canonical_bytes(self) -> bytes:
        return encode(self)

    @property
    def view_id(self) -> ViewId:
        return ViewId(self.number, self.digest())

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(Member(record.peer_id, record.life) for record in self.records)

    def record(self, peer_id: str) -> PeerRecord:
        for record in self.records:
            if record.peer_id == peer_id:
                return record
        raise KeyError(peer_id)

    def states(self) -> dict[str, set[int]]:
        """The layers whose state each peer has at `step`."""
        found: dict[str, set[int]] = {}
        for item in self.held:
            if item.version == self.step:
                found.setdefault(item.peer_id, set()).add(item.layer)
        return found


def founding_snapshot(
    run_digest: str, workload: Workload, records: Iterable[PeerRecord]
) -> Snapshot:
    """The snapshot of a run in which training begins with these peers."""
    in_order = sorted_records(list(records))
    return Snapshot(
        run_digest=run_digest,
        workload=workload,
        number=1,
        previous=GENESIS,
        planned=False,
        records=in_order,
        contributors=tuple(Member(record.peer_id, record.life) for record in in_order),
        absent=(),
        step=0,
        present=None,
    )


def sorted_records(records: list[PeerRecord]) -> tuple[PeerRecord, ...]:
    """Canonical order of records in a snapshot."""
    return tuple(sorted(records, key=lambda record: record.peer_id))
