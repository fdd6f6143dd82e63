"""A contribution as it travels in a swarm of many: what many say alike is named by its digest.

A record, a view's members and a plan are the same in a thousand contributions, or were in the view
before. So they travel once, beside the outlines that name them, and only to whom they are news.
"""

import hashlib
from collections.abc import Collection
from functools import lru_cache

import msgspec

from p2p_dtfm.core.messages.agreement_messages import (
    Bodies,
    Contribution,
    KnownView,
    PendingStep,
    PresentView,
    RetainedStep,
    SavedState,
    require_passed_on,
)
from p2p_dtfm.core.messages.message_bounds import VIEWS_LIMIT as SENT_VIEWS_LIMIT
from p2p_dtfm.core.messages.message_bounds import require_bounded_part
from p2p_dtfm.core.protocol.canonical import encode, encode_for_wire
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import PeerRecord, payload_of
from p2p_dtfm.core.protocol.signed import Sign, Signed, Verify, open_signed, sign
from p2p_dtfm.core.protocol.snapshot import Bar, Member

OUTLINE = "outline"
RECORDS_LIMIT = 4096
RECORDS_LIMIT_BYTES = 16 << 20
VIEWS_LIMIT = 64


class Outline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`record`, `view` and `origins` are digests; `view` is empty where there is none."""

    member: Member
    number: int
    record: bytes
    view: bytes
    has_plan: bool
    origins: tuple[bytes, ...]
    step: int
    held: dict[int, int]
    joiners: tuple[Member, ...]
    rows: tuple[int, ...]
    """In a founder's: in rows of so many its joiners and itself stand (`overlay.grid`)."""
    lineages: dict[int, str]
    saved: tuple[SavedState, ...]
    cuts: tuple[SavedState, ...]
    pending: PendingStep | None
    retained: RetainedStep | None
    accepts_loss: bool
    accusers: tuple[str, ...]
    bars: tuple[Bar, ...]


def record_name(record: Signed) -> bytes:
    """What outlines name it by."""
    return _name_of_record(record.peer_id, record.payload)


def names_in(records: Collection[PeerRecord]) -> frozenset[bytes]:
    """Of records as a snapshot holds them."""
    return frozenset(_name_of_record(record.peer_id, payload_of(record)) for record in records)


def _name_of_record(peer_id: str, payload: bytes) -> bytes:
    """Peers that are alike say the same of themselves."""
    return hashlib.blake2b(peer_id.encode() + b"\0" + payload, digest_size=32).digest()


@lru_cache(maxsize=256)
def view_name(view: KnownView) -> bytes:
    """What outlines name it by."""
    return hashlib.blake2b(encode(view), digest_size=32).digest()


def view_body(present: PresentView) -> KnownView:
    """The view itself, apart from what its members add to it."""
    digest = present.plan.digest() if present.plan is not None else ""
    return KnownView(present.view, present.members, digest)


class NamedBodies:
    """What outlines name, as far as it is known. Bounded; what went is asked for again."""

    def __init__(self) -> None:
        self._records: dict[bytes, Signed] = {}
        self._records_bytes = 0
        self._views: dict[bytes, KnownView] = {}
        self._plans: dict[str, Plan] = {}
        self._presents: dict[tuple[bytes, bool], PresentView] = {}
        self._names: dict[int, tuple[PresentView, bytes]] = {}
        self._rows: dict[Member, tuple[int, ...]] = {}

    def keep_record(self, record: Signed) -> bytes:
        """Whoever gave it has been checked. Returns its name."""
        name = record_name(record)
        if name not in self._records:
            self._records_bytes += len(record.payload)
            self._records[name] = record
        while len(self._records) > RECORDS_LIMIT or self._records_bytes > RECORDS_LIMIT_BYTES:
            oldest = next(iter(self._records))
            self._records_bytes -= len(self._records.pop(oldest).payload)
        return name

    def record(self, name: bytes) -> Signed | None:
        """None: it is not known, or not any more."""
        return self._records.get(name)

    def keep_view(self, view: KnownView) -> bytes:
        """Returns its name."""
        name = view_name(view)
        if name not in self._views:
            while len(self._views) >= VIEWS_LIMIT:
                del self._views[next(iter(self._views))]
            self._presents = {}
        self._views[name] = view
        return name

    def keep_plan(self, plan: Plan) -> None:
        digest = plan.digest()
        while len(self._plans) >= VIEWS_LIMIT and digest not in self._plans:
            del self._plans[next(iter(self._plans))]
        self._plans[digest] = plan

    def keep(self, bodies: Bodies) -> None:
        """Of records: those that the caller has opened."""
        for record in bodies.records:
            self.keep_record(record)
        for view in bodies.views:
            self.keep_view(view)
        for plan in bodies.plans:
            self.keep_plan(plan)

    def keep_rows(self, founder: Member, rows: tuple[int, ...]) -> None:
        """How a founder has arranged who founds a run with it."""
        while len(self._rows) >= VIEWS_LIMIT:
            del self._rows[next(iter(self._rows))]
        self._rows[founder] = rows

    def rows_of(self, founder: Member) -> tuple[int, ...]:
        return self._rows.get(founder, ())

    def name_of(self, present: PresentView | None) -> bytes:
        """Of a view that somebody is in, which is kept with its plan."""
        if present is None:
            return b""
        held = self._names.get(id(present))
        if held is None or held[0] is not present:
            if present.plan is not None:
                self.keep_plan(present.plan)
            if len(self._names) >= VIEWS_LIMIT:
                self._names.clear()
            held = self._names[id(present)] = present, self.keep_view(view_body(present))
        return held[1]

    def outlined(self, part: Contribution, rows: tuple[int, ...] = ()) -> Outline:
        """The same, with names in place of bodies, which are kept."""
        present = part.present
        return Outline(
            member=part.member,
            number=part.number,
            record=self.keep_record(part.record),
            view=self.name_of(present),
            has_plan=present is not None and present.plan is not None,
            origins=tuple(map(self.keep_view, part.origins)),
            rows=rows,
            **{name: getattr(part, name) for name in _SAID_IN_FULL},
        )

    def knows(self, outline: Outline) -> bool:
        """Whether it can be filled."""
        has_view = not outline.view or self._present(outline) is not None
        return has_view and outline.record in self._records

    def filled(self, outline: Outline) -> Contribution | None:
        """With what it names; None where that is not known."""
        record = self.record(outline.record)
        present = self._present(outline)
        if record is None or (outline.view and present is None):
            return None
        said = {name: getattr(outline, name) for name in _SAID_IN_FULL}
        # who is a member itself needs to know nothing of where a fellow came from
        origins = tuple(self._views[name] for name in outline.origins if name in self._views)
        return Contribution(
            outline.member, outline.number, record, present, **said, origins=origins
        )

    def _present(self, outline: Outline) -> PresentView | None:
        key = outline.view, outline.has_plan
        view = self._views.get(outline.view)
        plan = self._plans.get(view.plan_digest) if view is not None and outline.has_plan else None
        if view is None or (outline.has_plan and plan is None):
            return None
        held = self._presents.get(key)
        if held is None:
            held = PresentView(view.view, view.members, plan)
            if len(self._presents) >= VIEWS_LIMIT:
                self._presents.clear()
            self._presents[key] = held
        return held

    def bodies_of(self, parts: Collection[Contribution]) -> Bodies:
        """All that the outlines of these name, each once."""
        records = {part.record: None for part in parts}
        presents = {id(part.present): part.present for part in parts if part.present is not None}
        views = list(dict.fromkeys(map(view_body, presents.values())))
        origins = dict.fromkeys(view for part in parts for view in part.origins)
        views += list(origins)[: max(0, SENT_VIEWS_LIMIT - len(views))]
        plans = {it.plan.digest(): it.plan for it in presents.values() if it.plan is not None}
        return Bodies(tuple(records), tuple(views), tuple(plans.values()))


_SAID_IN_FULL = (
    "step",
    "held",
    "joiners",
    "lineages",
    "saved",
    "cuts",
    "pending",
    "retained",
    "accepts_loss",
    "accusers",
    "bars",
)


def sign_outline(outline: Outline, signer: Sign) -> Signed:
    return sign(outline.member.peer_id, OUTLINE, encode_for_wire(outline), signer)


@lru_cache(maxsize=4096)
def open_outline(signed: Signed, verify: Verify) -> Outline:
    """Raises `PeerFault` for a forgery or malformed contents."""
    outline = open_signed(signed, OUTLINE, Outline, verify)
    require_passed_on(outline.pending, outline.retained, signed.peer_id, verify)
    require_bounded_part(outline, signed.peer_id)
    return outline
