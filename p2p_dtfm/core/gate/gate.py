"""The gate before every handler: a pure machine over `core.gate.gate_table`.

Each sender has a bucket of tokens for each kind; strangers as a class, and newcomers as a class,
have one more. A refusal takes a further token of its sender. A stranger or newcomer that is refused
again and again is muted for growing times. All that is kept is bounded.
"""

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from p2p_dtfm.core.gate.gate_table import FAR, Rate, Role, Row, row_of
from p2p_dtfm.core.units import SECOND_NS

SENDERS_LIMIT = 4096
"""When there are more senders, the one heard longest ago is forgotten."""
PATIENCE = 64
"""Refusals in a row, less one for each second, that a stranger or newcomer may collect."""
MUTED_NS = 5 * SECOND_NS
MUTES_LIMIT = 8
"""The time doubles up to 2^7 times `MUTED_NS`, eleven minutes."""
CLASS_AT_ONCE = 4
_UNIT = SECOND_NS
"""A token, in parts: one token a second is one part a nanosecond."""


class Reason(StrEnum):
    PLACE = "not its place to say"
    SIZE = "too large"
    RATE = "too often"
    TOGETHER = "too often, all such senders together"
    AT_ONCE = "too many at once"
    MUTED = "muted"
    CONTENT = "not in this form"
    """Told by the handler: see `Gate.blame`."""


class Admitted(msgspec.Struct, frozen=True):
    role: Role


class GateRefusal(msgspec.Struct, frozen=True):
    role: Role
    reason: Reason


@dataclass
class _Bucket:
    parts: int
    at_ns: int

    def take(self, rate: Rate, now_ns: int) -> bool:
        """Take a token; False if there is none."""
        has = self.has(rate, now_ns)
        self.parts -= _UNIT * has
        return has

    def has(self, rate: Rate, now_ns: int) -> bool:
        """Whether there is a token."""
        self._regain(rate, now_ns)
        return self.parts >= _UNIT

    def spend(self, rate: Rate, amount: int, now_ns: int) -> None:
        """Pay for what has been done: a bucket that has too little owes the rest."""
        self._regain(rate, now_ns)
        self.parts -= amount * _UNIT

    def owes(self, rate: Rate, now_ns: int) -> bool:
        self._regain(rate, now_ns)
        return self.parts < 0

    def _regain(self, rate: Rate, now_ns: int) -> None:
        passed_ns = now_ns - self.at_ns
        if passed_ns > 0:
            self.parts += passed_ns * rate.per_s
            self.at_ns = now_ns
        full = rate.burst * _UNIT
        if self.parts > full:
            self.parts = full

    def charge_refusal(self) -> None:
        """Take one more token, if one is left; a debt stays as it is."""
        self.parts = min(self.parts, max(0, self.parts - _UNIT))


@dataclass
class _Sender:
    buckets: dict[str, _Bucket] = field(default_factory=dict)
    refused: int = 0
    refused_ns: int = 0
    muted_until_ns: int = 0
    mutes: int = 0
    serving: collections.Counter[str] = field(default_factory=collections.Counter)


class Gate:
    """`role_of` says what a sender is now, `is_outside` whether this peer is in no view, `is_open`
    whether the run gives its files to everybody, `is_closed` whether it is for guests alone."""

    def __init__(
        self,
        role_of: Callable[[str], Role],
        is_outside: Callable[[], bool] = lambda: False,
        is_open: Callable[[], bool] = lambda: False,
        is_closed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.refused: collections.Counter[tuple[str, str, str]] = collections.Counter()
        """How often, by (role, kind, reason)."""
        self._role_of = role_of
        self._is_outside = is_outside
        self._is_open = is_open
        self._is_closed = is_closed
        self._senders: collections.OrderedDict[str, _Sender] = collections.OrderedDict()
        self._classes: dict[tuple[Role, str], _Bucket] = {}
        self._serving: collections.Counter[tuple[Role, str]] = collections.Counter()

    def admit(
        self,
        sender: str,
        kind: str,
        size_bytes: int,
        now_ns: int,
        *,
        stays: bool = False,
        pays: str = "",
    ) -> Admitted | GateRefusal:
        """Whether `sender` may say this now. With `stays` it counts as being served until `left` is
        called with the role that it was admitted in. `pays`: a kind of which it must owe nothing
        (`spend`)."""
        role = self._role_of(sender)
        row = row_of(kind, self._is_open(), self._is_closed())
        held = self._sender(sender)
        pays = kind if row.is_paid_later else pays
        reason = self._owes(held, role, pays, now_ns) if pays else None
        reason = reason or self._reason(held, role, row, kind, size_bytes, now_ns)
        if reason is None and stays and self._is_full(held, role, row, kind):
            reason = Reason.AT_ONCE
        if reason is not None:
            return self._refuse(held, role, kind, reason, now_ns)
        if stays:
            held.serving[kind] += 1
            self._serving[role, kind] += 1
        return Admitted(role)

    def glance(
        self, sender: str, kind: str, size_bytes: int, now_ns: int, pays: str = ""
    ) -> GateRefusal | None:
        """Why `sender` may not say this now, before it is read; None: it may. What is let in pays
        for itself once it is read. A refusal is paid for here."""
        role = self._role_of(sender)
        row = row_of(kind, self._is_open(), self._is_closed())
        held = self._sender(sender)
        reason = self._owes(held, role, pays, now_ns) if pays else None
        reason = reason or self._reason(held, role, row, kind, size_bytes, now_ns, _Bucket.has)
        return None if reason is None else self._refuse(held, role, kind, reason, now_ns)

    def left(self, sender: str, role: Role, kind: str) -> None:
        """What was admitted with `stays` has been served."""
        self._serving[role, kind] -= 1
        if (held := self._senders.get(sender)) is not None and held.serving[kind] > 0:
            held.serving[kind] -= 1

    def spend(self, sender: str, kind: str, amount: int, now_ns: int) -> None:
        """Charge a sender with what handling something has cost.

        What it, or all such strangers or newcomers together, cannot pay for is owed. Until that has
        come back, nothing more is admitted that `pays` for this kind.
        """
        if amount <= 0:
            return
        role = self._role_of(sender)
        row = row_of(kind, self._is_open(), self._is_closed())
        rate, held = _rate_of(row, role), self._sender(sender)
        _bucket(held, kind, rate, now_ns).spend(rate, amount, now_ns)
        if role in FAR:
            self._class(role, kind, row, now_ns).spend(row.together, amount, now_ns)

    def _owes(self, held: _Sender, role: Role, kind: str, now_ns: int) -> Reason | None:
        row = row_of(kind, self._is_open(), self._is_closed())
        rate = _rate_of(row, role)
        if _bucket(held, kind, rate, now_ns).owes(rate, now_ns):
            return Reason.RATE
        if role in FAR and self._class(role, kind, row, now_ns).owes(row.together, now_ns):
            return Reason.TOGETHER
        return None

    def blame(self, sender: str, kind: str, now_ns: int) -> None:
        """A handler found the content of an admitted message wrong."""
        held = self._sender(sender)
        self._refuse(held, self._role_of(sender), kind, Reason.CONTENT, now_ns)

    def _reason(
        self,
        held: _Sender,
        role: Role,
        row: Row,
        kind: str,
        size_bytes: int,
        now_ns: int,
        pay: Callable[[_Bucket, Rate, int], bool] = _Bucket.take,
    ) -> Reason | None:
        """Why to refuse; None: there is no reason. `pay`: takes a token, or only looks whether
        there is one."""
        if (reason := self._out_of_place(held, role, row, size_bytes, now_ns)) is not None:
            return reason
        rate = _rate_of(row, role)
        if not pay(_bucket(held, kind, rate, now_ns), rate, now_ns):
            return Reason.RATE
        if role in FAR and not pay(self._class(role, kind, row, now_ns), row.together, now_ns):
            return Reason.TOGETHER
        return None

    def _out_of_place(
        self, held: _Sender, role: Role, row: Row, size_bytes: int, now_ns: int
    ) -> Reason | None:
        if role in FAR and now_ns < held.muted_until_ns:
            return Reason.MUTED
        roles = row.roles
        if self._is_outside():
            roles = row.outside if row.outside is not None else row.roles
        if role not in roles:
            return Reason.PLACE
        limit_bytes = row.size_bytes
        if role is Role.STRANGER and row.stranger_bytes is not None and not self._is_outside():
            limit_bytes = row.stranger_bytes
        if size_bytes > limit_bytes:
            return Reason.SIZE
        return None

    def _class(self, role: Role, kind: str, row: Row, now_ns: int) -> _Bucket:
        key = (role, kind)
        if key not in self._classes:
            self._classes[key] = _Bucket(row.together.burst * _UNIT, now_ns)
        return self._classes[key]

    def _is_full(self, held: _Sender, role: Role, row: Row, kind: str) -> bool:
        if role not in FAR:
            return False
        together = self._serving[role, kind] >= CLASS_AT_ONCE * row.at_once
        return together or held.serving[kind] >= row.at_once

    def _refuse(
        self, held: _Sender, role: Role, kind: str, reason: Reason, now_ns: int
    ) -> GateRefusal:
        self.refused[role, kind, reason] += 1
        if reason not in (Reason.TOGETHER, Reason.MUTED):  # these are not of its own doing
            if (bucket := held.buckets.get(kind)) is not None:
                bucket.charge_refusal()
            calm = max(0, now_ns - held.refused_ns) // SECOND_NS
            held.refused = max(0, held.refused - calm) + 1
            held.refused_ns = now_ns
            if role in FAR and held.refused > PATIENCE:
                held.muted_until_ns = now_ns + (MUTED_NS << held.mutes)
                held.mutes = min(held.mutes + 1, MUTES_LIMIT - 1)
                held.refused = 0
        return GateRefusal(role, reason)

    def _sender(self, sender: str) -> _Sender:
        held = self._senders.get(sender)
        if held is None:
            held = self._senders[sender] = _Sender()
            if len(self._senders) > SENDERS_LIMIT:
                self._senders.popitem(last=False)
        else:
            self._senders.move_to_end(sender)
        return held


def _rate_of(row: Row, role: Role) -> Rate:
    """The rate of one sender."""
    return row.sender if role in FAR else row.near


def _bucket(held: _Sender, kind: str, rate: Rate, now_ns: int) -> _Bucket:
    bucket = held.buckets.get(kind)
    if bucket is None:
        bucket = held.buckets[kind] = _Bucket(rate.burst * _UNIT, now_ns)
    return bucket
