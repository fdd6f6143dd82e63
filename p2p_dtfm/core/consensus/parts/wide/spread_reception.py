"""What arrives along the overlay: it is read as the Gather and the Ready that it stands for."""

from collections import Counter

from p2p_dtfm.core.consensus.actions import Actions, SendMessage, Verdict, refused
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.wide import Wide
from p2p_dtfm.core.consensus.parts.gather.far_senders import (
    is_near,
    is_under_way,
    refusal_of_far,
    spread_worth_reading,
)
from p2p_dtfm.core.consensus.parts.gather.gather_reception import GatherReception
from p2p_dtfm.core.consensus.parts.gather.gathering import Gathering
from p2p_dtfm.core.consensus.parts.wide.spreading import Spreading
from p2p_dtfm.core.messages.agreement_messages import Gather, Ready, ReadySet, Spread
from p2p_dtfm.core.messages.outlines import OUTLINE, open_outline, require_sound
from p2p_dtfm.core.messages.statements import is_stated
from p2p_dtfm.core.protocol.canonical import encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId

EARLY_LIMIT = 128
EARLY_LIMIT_BYTES = 16 << 20
"""Bytes of early messages, as they came; once read, numbers and empty names take eight times as
much."""
GIVERS_LIMIT = 4096


class SpreadReception:
    """A peer that passes something on has looked at it: a forgery in it is the fault of the
    sender."""

    def __init__(
        self,
        state: AgreementState,
        reception: GatherReception,
        gathering: Gathering,
        spreading: Spreading,
    ) -> None:
        self._state = state
        self._reception = reception
        self._gathering = gathering
        self._spreading = spreading
        self._named: ViewId | None = None

    def receive(self, message: Spread, now_ns: int) -> Verdict:
        """Raises `PeerFault`."""
        if not self._may_be_of_many(message):
            return refused("it is for a swarm of many, and nobody known has said that this is one")
        state = self._state
        was_in, proven = is_under_way(state, message), state.others.views.certified
        verdict = self._receive(message, now_ns)
        actions = [*verdict.actions]
        if not is_under_way(state, message):
            if self._may_know_of_many(message.sender):
                self._keep_for_later(message)
            if state.others.views.certified == proven:
                return verdict
            actions += self._enter_by_early(message, now_ns)
        return Verdict(actions + self._read_early(message, was_in, now_ns), verdict.reason)

    def _enter_by_early(self, message: Spread, now_ns: int) -> Actions:
        """Enter an attempt by early messages, if they let this newcomer in. What it is told in
        parts may come in any order: a member may have named it before there was proof of that
        member's view."""
        actions: Actions = []
        for one, _ in self._state.attempts.early:
            if not is_under_way(self._state, message) and _are_of_one_attempt(one, message):
                actions += self._receive(one, now_ns).actions
        return actions

    def _read_early(self, message: Spread, was_in: bool, now_ns: int) -> Actions:
        """Read the early messages of an attempt once this peer takes part in it."""
        if not is_under_way(self._state, message):
            return []
        early, self._state.attempts.early = self._state.attempts.early, []
        actions: Actions = []
        for one, _ in early if not was_in else ():
            if _are_of_one_attempt(one, message):
                actions += self._receive(one, now_ns).actions
        return actions

    def _may_be_of_many(self, message: Spread) -> bool:
        """Whether to read what the sender says along an overlay. In an attempt that goes along the
        overlay for a crowd, all who come with that crowd are heard."""
        attempt = self._state.attempt
        is_of_many = attempt is not None and attempt.wide is not None
        return is_of_many or self._may_know_of_many(message.sender)

    def _may_know_of_many(self, sender: Member) -> bool:
        """Whether the sender may know of more peers: it may if it has been in a view with this one.

        Nobody else can make the members of a small view speak along an overlay, or keep its word of
        attempts to come. For that, so many would have to ask to be let in.
        """
        state = self._state
        if state.is_newcomer or len(state.members) > state.timing.wide_above:
            return True
        return sender in state.members or self._is_familiar(sender.peer_id)

    def _is_familiar(self, peer_id: str) -> bool:
        others = self._state.others
        if others.familiar.holds(peer_id):
            return True
        return any(peer_id in known.peer_ids for known in others.views.history)

    def _keep_own_view(self) -> None:
        """Keep what this peer's own view says of itself: fellows only name it, and do not send it
        along."""
        state = self._state
        if state.view is not None and self._named != state.view.id:
            self._named = state.view.id
            state.others.bodies.name_of(state.present_view())

    def _keep_for_later(self, message: Spread) -> None:
        """Keep a message of an attempt to come: neighbours may be faster than the news by which
        this peer may take part."""
        state = self._state
        over = max(state.promises.passed_number, state.view_id.number)
        if message.number > over:
            early = [it for it in state.attempts.early if it[0].number > over]
            state.attempts.early = _with_room([*early, (message, len(encode_for_wire(message)))])

    def _receive(self, message: Spread, now_ns: int) -> Verdict:
        if message.planned != (message.number % 2 == 0):
            raise PeerFault("a view with a number of the wrong parity", message.sender.peer_id)
        if is_near(self._state, message.sender.peer_id):
            return self._receive_whole(message, now_ns)
        refusal = refusal_of_far(self._state, message)
        kept = None if refusal else self._worth_reading(message)
        if kept is None:
            return self._reception.answer_far(message, refusal, now_ns)
        return self._receive_whole(kept, now_ns)

    def _receive_whole(self, message: Spread, now_ns: int) -> Verdict:
        ready, sender = self._said_ready(message), message.sender.peer_id
        self._keep_bodies(message)
        self._note_giver(message)
        held = self._along_the_overlay(message)
        if held is not None:
            held[1].giver = sender
        if held is not None and _says_ready_only(message, held[0]):
            verdict = Verdict([], "it says Ready of some")
            self._state.attempts.spread_giver = ""
        else:
            verdict = self._read(message, held, now_ns)
        held = self._along_the_overlay(message)
        if held is None:
            return Verdict(verdict.actions + self._missed(message), verdict.reason)
        attempt, wide = held
        wide.giver = sender
        actions = [*verdict.actions]
        grew = self._gathering.take_ready(attempt, ready, now_ns)
        if message.wants or message.wants_ready:
            actions += self._spreading.answer(attempt, message)
        actions += self._spreading.note(attempt, now_ns)
        wide.giver = ""
        if grew and attempt.outcome.may_be_agreed:
            actions += self._gathering.check_ready(now_ns)
        return Verdict(actions, verdict.reason)

    def _worth_reading(self, message: Spread) -> Spread | None:
        def named_by(signed: Signed) -> tuple[Member, ...]:
            outline = open_outline(signed, self._state.settings.verify)
            return outline.joiners if outline.number == message.number else ()

        return spread_worth_reading(self._state, message, named_by)

    def _keep_bodies(self, message: Spread) -> None:
        self._keep_own_view()
        view, records = self._state.view, message.bodies.records
        members = frozenset(view.member_ids if view is not None and records else ())
        for record in records:
            if record.peer_id in members:
                self._state.open_record(record)
            else:
                self._state.open_newcomer(record)
        bodies = self._state.others.bodies
        verify = self._state.settings.verify
        require_sound(message.bodies, bodies, message.sender.peer_id, verify)
        bodies.keep(message.bodies)
        self._note_rows(message)

    def _note_giver(self, message: Spread) -> None:
        attempts, sender = self._state.attempts, message.sender.peer_id
        is_here = is_under_way(self._state, message)
        if is_here or self._may_know_of_many(message.sender):
            if attempts.spread_number != message.number:
                attempts.givers = {}
            attempts.spread_number = message.number
        if len(attempts.givers) > GIVERS_LIMIT:
            attempts.givers = {}
        attempts.spread_giver = sender
        for signed in message.contributions:
            attempts.givers.setdefault(signed.signature, sender)

    def _read(self, message: Spread, held: tuple[Attempt, Wide] | None, now_ns: int) -> Verdict:
        """Read the message as a Gather. If it is refused halfway, what comes next was not given by
        its sender."""
        try:
            gather = self._as_gather(message, held[0] if held is not None else None)
            return self._reception.receive(gather, now_ns)
        finally:
            self._state.attempts.spread_giver = ""
            self._state.attempts.spread_makers = frozenset()
            if held is not None:
                held[1].giver = ""

    def _along_the_overlay(self, message: Spread) -> tuple[Attempt, Wide] | None:
        """The attempt under way, if the message is of it. From now on the attempt goes along the
        overlay, since others know of many more."""
        attempt = self._state.attempt
        if attempt is None or not is_under_way(self._state, message):
            return None
        wide = attempt.passed_on.wide = attempt.wide or Wide(hasty=False)
        return attempt, wide

    def _as_gather(self, message: Spread, attempt: Attempt | None) -> Gather:
        verify, bodies = self._state.settings.verify, self._state.others.bodies
        attempts = self._state.attempts
        fresh, known = list[Signed](), attempt.known if attempt is not None else {}
        for signed in message.contributions:
            if signed.kind == OUTLINE:
                outline = open_outline(signed, verify)
                if outline.number != message.number:
                    raise PeerFault("an outline of another view", message.sender.peer_id)
                if known.get(outline.member) == signed:
                    continue
                if not bodies.knows(outline):  # it is asked for while it is still waited for
                    attempts.givers.pop(signed.signature, None)
                    continue
            fresh.append(signed)
        makers = frozenset(signed.peer_id for signed in message.contributions)
        attempts.spread_makers = makers
        return Gather(
            sender=message.sender,
            number=message.number,
            planned=message.planned,
            base=message.base,
            round=message.round,
            contributions=tuple(fresh),
            absent=message.absent,
            digest=message.digest,
            accusations=message.accusations,
            newcomers=tuple(it for it in message.bodies.records if it.peer_id not in makers),
            certificates=message.certificates,
        )

    def _note_rows(self, message: Spread) -> None:
        for signed in message.contributions:
            if signed.kind == OUTLINE:
                outline = open_outline(signed, self._state.settings.verify)
                if outline.rows:
                    self._state.others.bodies.keep_rows(outline.member, outline.rows)

    def _said_ready(self, message: Spread) -> list[Ready]:
        attempt = self._state.attempt
        known = attempt.ready if attempt is not None and attempt.number == message.number else {}
        found = []
        for said in message.ready_sets:
            if said.view.number != message.number:
                raise PeerFault("Ready of another attempt", message.sender.peer_id)
            for ready in _each(said):
                if ready.sender in known:
                    continue
                if not is_stated(ready, self._state.settings.verify):
                    raise PeerFault("passes on a forged Ready", message.sender.peer_id)
                found.append(ready)
        return found

    def _missed(self, message: Spread) -> Actions:
        """The certificate, for a sender that lacks Ready of what this peer has agreed on and not
        taken over yet."""
        view = self._state.next_view
        if not message.wants_ready or view is None or view.certificate is None:
            return []
        if view.id.number != message.number or message.sender not in view.snapshot.contributors:
            return []
        proof = Gather(
            sender=self._state.me,
            number=message.number,
            planned=message.planned,
            base=message.base,
            round=0,
            contributions=(),
            absent=(),
            digest="",
            certificates=(view.certificate,),
        )
        return [SendMessage((message.sender.peer_id,), proof)]


def _with_room(early: list[tuple[Spread, int]]) -> list[tuple[Spread, int]]:
    """As many early messages as there is room for. The oldest go of who has said most: nobody has
    what others have said forgotten."""
    counts, sizes_bytes = Counter[str](), Counter[str]()
    for message, size_bytes in early:
        counts[message.sender.peer_id] += 1
        sizes_bytes[message.sender.peer_id] += size_bytes
    while counts.total() > EARLY_LIMIT or sizes_bytes.total() > EARLY_LIMIT_BYTES:
        of = counts if counts.total() > EARLY_LIMIT else sizes_bytes
        most = max(of, key=of.__getitem__)
        at = next(n for n, (it, _) in enumerate(early) if it.sender.peer_id == most)
        counts[most] -= 1
        sizes_bytes[most] -= early.pop(at)[1]
    return early


def _are_of_one_attempt(one: Spread, other: Spread) -> bool:
    return (one.number, one.base) == (other.number, other.base)


def _says_ready_only(message: Spread, attempt: Attempt) -> bool:
    """Whether the message brings no knowledge that could be new."""
    if attempt.snapshot is None or message.digest not in ("", attempt.snapshot.knowledge):
        return False
    return not (message.contributions or message.accusations or message.certificates)


def _each(said: ReadySet) -> list[Ready]:
    view, plan, members = said.view, said.plan_digest, said.members_digest
    return [Ready(member, view, plan, members, signature) for member, signature in said.said]
