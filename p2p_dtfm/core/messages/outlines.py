"""Outlines: contributions as they travel in a swarm of many, naming common parts by digest.

A thousand contributions hold the same view's members and plan, and records that were already in the
view before. Most retain the same step, and after a failure all pass on the same Prepared. So these
bodies travel once, beside the outlines that name them, and only to receivers that lack them.
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
    RetainedBody,
    RetainedStep,
    SavedState,
    prepared_in,
    require_all_prepared,
    require_few_prepared,
    require_passed_on,
)
from p2p_dtfm.core.messages.message_bounds import VIEWS_LIMIT as SENT_VIEWS_LIMIT
from p2p_dtfm.core.messages.message_bounds import require_bounded_part
from p2p_dtfm.core.messages.opened_once import OpenedOnce
from p2p_dtfm.core.protocol.canonical import Numbered, encode, encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import PeerRecord, payload_of
from p2p_dtfm.core.protocol.signed import Sign, Signed, Verify, open_signed, sign
from p2p_dtfm.core.protocol.snapshot import Bar, Member

OUTLINE = "outline"
RECORDS_LIMIT = 4096
RECORDS_LIMIT_BYTES = 16 << 20
VIEWS_LIMIT = 64
PREPARED_KEPT = 4096
PREPARED_KEPT_BYTES = 16 << 20
RETAINED_KEPT = 1024
OUTLINES_OPENED_BYTES = 8 << 20
PLANS_KEPT_BYTES = 8 << 20
PREPARED_NAME_BYTES = 20
"""An outline may have many of these names; to find two Prepared with one takes 2^80 tries."""


class Outline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A contribution in which `record`, `view`, `origins` and `retained` are digests. `view` and
    `retained` are empty where there is none."""

    member: Member
    number: int
    record: bytes
    view: bytes
    has_plan: bool
    origins: tuple[bytes, ...]
    step: int
    held: Numbered[int]
    joiners: tuple[Member, ...]
    rows: tuple[int, ...]
    """In a founder's outline: how many peers stand in each row, of its joiners and itself
    (`overlay.grid`)."""
    lineages: Numbered[str]
    saved: tuple[SavedState, ...]
    cuts: tuple[SavedState, ...]
    pending: PendingStep | None
    pending_prepared: tuple[bytes, ...]
    """Names of the pending step's Prepared, which `pending` itself leaves out."""
    retained: bytes
    retained_layers: tuple[int, ...]
    """The layers of which the member has the retained step's reduced gradients."""
    accepts_loss: bool
    may_repeat: int
    accusers: tuple[str, ...]
    doubted: tuple[tuple[str, str], ...]
    bars: tuple[Bar, ...]


_opened = OpenedOnce[Outline](OUTLINES_OPENED_BYTES)
_names = OpenedOnce[bytes](PREPARED_KEPT_BYTES)


def record_name(record: Signed) -> bytes:
    """The name by which outlines refer to a record."""
    return _name_of_record(record.peer_id, record.payload)


def names_in(records: Collection[PeerRecord]) -> frozenset[bytes]:
    """The names of records as a snapshot holds them."""
    return frozenset(_name_of_record(record.peer_id, payload_of(record)) for record in records)


def _name_of_record(peer_id: str, payload: bytes) -> bytes:
    """The name covers the peer's id, since peers that are alike say the same of themselves."""
    return hashlib.blake2b(peer_id.encode() + b"\0" + payload, digest_size=32).digest()


def prepared_name(prepared: Signed) -> bytes:
    """The name by which outlines refer to a Prepared: it covers what was said, and by whom."""
    if (name := _names.find(prepared)) is not None:
        return name
    name = hashlib.blake2b(encode(prepared), digest_size=PREPARED_NAME_BYTES).digest()
    return _names.keep(prepared, name)


def retained_name(body: RetainedBody) -> bytes:
    """The name by which outlines refer to a retained step."""
    return hashlib.blake2b(encode(body), digest_size=32).digest()


@lru_cache(maxsize=256)
def view_name(view: KnownView) -> bytes:
    """The name by which outlines refer to a view."""
    return hashlib.blake2b(encode(view), digest_size=32).digest()


def view_body(present: PresentView) -> KnownView:
    """The view itself, apart from what its members add to it."""
    digest = present.plan.digest() if present.plan is not None else ""
    return KnownView(present.view, present.members, digest)


class _NewestSigned(dict[bytes, Signed]):
    """The newest signed statements by name, up to a count and a size in bytes."""

    def __init__(self, count_limit: int, limit_bytes: int) -> None:
        super().__init__()
        self._count_limit, self._limit_bytes = count_limit, limit_bytes
        self._size_bytes = 0

    def keep(self, name: bytes, signed: Signed) -> bytes:
        """Keeps a statement; older ones make room. Returns the name."""
        if name not in self:
            self._size_bytes += len(signed.payload)
            self[name] = signed
        while len(self) > self._count_limit or self._size_bytes > self._limit_bytes:
            self._size_bytes -= len(self.pop(next(iter(self))).payload)
        return name


class NamedBodies:
    """The known bodies that outlines name. They are bounded; a dropped one is asked for again."""

    def __init__(self) -> None:
        self._records = _NewestSigned(RECORDS_LIMIT, RECORDS_LIMIT_BYTES)
        self._views: dict[bytes, KnownView] = {}
        self._plans: dict[str, Plan] = {}
        self._plan_bytes: dict[str, int] = {}
        """The size of each plan as it travels, by digest."""
        self._presents: dict[tuple[bytes, bool], PresentView] = {}
        self._names: dict[int, tuple[PresentView, bytes]] = {}
        self._rows: dict[Member, tuple[int, ...]] = {}
        self._prepared = _NewestSigned(PREPARED_KEPT, PREPARED_KEPT_BYTES)
        self._retained: dict[bytes, RetainedBody] = {}

    def keep_retained(self, body: RetainedBody) -> bytes:
        """Keeps a retained step that may be true. Returns its name."""
        name = retained_name(body)
        while len(self._retained) >= RETAINED_KEPT and name not in self._retained:
            del self._retained[next(iter(self._retained))]
        self._retained[name] = body
        return name

    def keep_prepared(self, prepared: Signed) -> bytes:
        """Keeps a Prepared that has been opened. Returns its name."""
        return self._prepared.keep(prepared_name(prepared), prepared)

    def has_prepared(self, prepared: Signed) -> bool:
        """Whether this very one is kept, and so has been opened."""
        return prepared_name(prepared) in self._prepared

    def beside(self, outline: Outline) -> tuple[Bodies, frozenset[bytes]]:
        """The known bodies of steps that an outline names, and their names."""
        body = self._retained.get(outline.retained)
        names = dict.fromkeys(outline.pending_prepared + (body.prepared if body else ()))
        prepared = {name: self._prepared[name] for name in names if name in self._prepared}
        said = (body,) if body is not None else ()
        known = {*prepared, outline.retained} if body is not None else prepared
        return Bodies(retained=said, prepared=tuple(prepared.values())), frozenset(known)

    def keep_record(self, record: Signed) -> bytes:
        """Keeps a record that has been checked. Returns its name."""
        return self._records.keep(record_name(record), record)

    def record(self, name: bytes) -> Signed | None:
        """The record of this name; None where it is not known, or no more."""
        return self._records.get(name)

    def keep_view(self, view: KnownView) -> bytes:
        """Keeps a view. Returns its name."""
        name = view_name(view)
        if name not in self._views:
            while len(self._views) >= VIEWS_LIMIT:
                del self._views[next(iter(self._views))]
            self._presents = {}
        self._views[name] = view
        return name

    def keep_plan(self, plan: Plan) -> None:
        digest = plan.digest()
        if digest in self._plans:
            return
        self._plans[digest], self._plan_bytes[digest] = plan, len(encode(plan))
        while len(self._plans) > VIEWS_LIMIT or sum(self._plan_bytes.values()) > PLANS_KEPT_BYTES:
            oldest = next(iter(self._plans))
            del self._plans[oldest], self._plan_bytes[oldest]

    def keep(self, bodies: Bodies) -> None:
        """Keeps all bodies. The caller has opened the records and Prepared among them."""
        for record in bodies.records:
            self.keep_record(record)
        for view in bodies.views:
            self.keep_view(view)
        for plan in bodies.plans:
            self.keep_plan(plan)
        for prepared in bodies.prepared:
            self.keep_prepared(prepared)
        for body in bodies.retained:
            self.keep_retained(body)

    def keep_rows(self, founder: Member, rows: tuple[int, ...]) -> None:
        """Keeps how a founder has arranged the peers that found a run with it."""
        while len(self._rows) >= VIEWS_LIMIT:
            del self._rows[next(iter(self._rows))]
        self._rows[founder] = rows

    def rows_of(self, founder: Member) -> tuple[int, ...]:
        return self._rows.get(founder, ())

    def name_of(self, present: PresentView | None) -> bytes:
        """The name of a contributor's view; the view and its plan are kept. Empty for None."""
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
        """The outline of a contribution. The bodies that it names are kept."""
        present, pending, retained = part.present, part.pending, part.retained
        return Outline(
            member=part.member,
            number=part.number,
            record=self.keep_record(part.record),
            view=self.name_of(present),
            has_plan=present is not None and present.plan is not None,
            origins=tuple(map(self.keep_view, part.origins)),
            rows=rows,
            pending=msgspec.structs.replace(pending, prepared=()) if pending else None,
            pending_prepared=tuple(map(self.keep_prepared, prepared_in(pending, None))),
            retained=self._keep_step(retained) if retained is not None else b"",
            retained_layers=retained.reduced_layers if retained is not None else (),
            **{name: getattr(part, name) for name in _SAID_IN_FULL},
        )

    def knows(self, outline: Outline) -> bool:
        """Whether the bodies that an outline names are known, so that it can be filled."""
        has_view = not outline.view or self._present(outline) is not None
        names, body = outline.pending_prepared, self._retained.get(outline.retained)
        if outline.record not in self._records or not has_view or (outline.retained and not body):
            return False
        return all(name in self._prepared for name in names + (body.prepared if body else ()))

    def filled(self, outline: Outline) -> Contribution | None:
        """The contribution of an outline; None where a body that it names is not known."""
        record = self.record(outline.record)
        present = self._present(outline)
        if record is None or not self.knows(outline):
            return None
        said = {name: getattr(outline, name) for name in _SAID_IN_FULL}
        # a member needs to know nothing of where a fellow came from
        origins = tuple(self._views[name] for name in outline.origins if name in self._views)
        return Contribution(
            outline.member,
            outline.number,
            record,
            present,
            **said,
            pending=self._pending(outline),
            retained=self._retained_step(outline),
            origins=origins,
        )

    def _keep_step(self, step: RetainedStep) -> bytes:
        names = tuple(map(self.keep_prepared, step.prepared))
        said = msgspec.structs.replace(step, prepared=(), reduced_layers=())
        return self.keep_retained(RetainedBody(said, names))

    def _pending(self, outline: Outline) -> PendingStep | None:
        prepared = tuple(self._prepared[name] for name in outline.pending_prepared)
        if outline.pending is None or not prepared:
            return outline.pending
        return msgspec.structs.replace(outline.pending, prepared=prepared)

    def _retained_step(self, outline: Outline) -> RetainedStep | None:
        body = self._retained.get(outline.retained)
        if body is None:
            return None
        prepared = tuple(self._prepared[name] for name in body.prepared)
        layers = outline.retained_layers
        return msgspec.structs.replace(body.said, prepared=prepared, reduced_layers=layers)

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
        """All records, views and plans that the outlines of these contributions name, each once."""
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
    "accepts_loss",
    "may_repeat",
    "accusers",
    "doubted",
    "bars",
)


def sign_outline(outline: Outline, signer: Sign) -> Signed:
    return sign(outline.member.peer_id, OUTLINE, encode_for_wire(outline), signer)


def open_outline(signed: Signed, verify: Verify) -> Outline:
    """Raises `PeerFault` for a forgery or malformed contents."""
    return _opened.find(signed) or _opened.keep(signed, _open_outline(signed, verify))


def _open_outline(signed: Signed, verify: Verify) -> Outline:
    outline = open_signed(signed, OUTLINE, Outline, verify)
    pending, names = outline.pending, outline.pending_prepared
    if pending.prepared if pending is not None else names:
        raise PeerFault("an outline with Prepared where none belong", signed.peer_id)
    require_few_prepared(len(names), signed.peer_id)
    require_bounded_part(outline, signed.peer_id)
    return outline


def require_sound(bodies: Bodies, kept: NamedBodies, sender: str, verify: Verify) -> None:
    """Raises `PeerFault` for steps and Prepared that nobody can have said. Prepared that are kept
    have been checked before."""
    for body in bodies.retained:
        if body.said.prepared or body.said.reduced_layers:
            raise PeerFault("a retained step with what belongs beside it", sender)
        require_few_prepared(len(body.prepared), sender)
        require_passed_on(None, body.said, sender, verify)
    new = tuple(prepared for prepared in bodies.prepared if not kept.has_prepared(prepared))
    require_all_prepared(new, sender, verify)
