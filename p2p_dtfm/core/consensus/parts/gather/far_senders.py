"""Far senders: peers with no place in a view with this peer, nor in the attempt under way.

Each item that a far sender passes on costs this peer a look at a signature, and keys cost nothing
to make. So this peer asks first whether it could take part at all. It then opens only what members,
and those that they name, have signed.

A peer in no view cannot know whose word counts. To it all senders are near, and the daemon's gate
bounds what their messages cost (`core.gate`).
"""

import collections
from collections.abc import Callable, Iterable, Iterator

import msgspec

from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.messages.agreement_messages import Gather, ReadySet, Spread
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member

NOBODY_OPENED = "no member of the present view has opened it"
OF_ONE_LIMIT = 2
"""Contributions under one name in a message: two, where somebody has signed two."""

NamedBy = Callable[[Signed], Iterable[Member]]
"""Opens a member's contribution, and returns whom it names. Raises `PeerFault`."""


def is_near(state: AgreementState, peer_id: str) -> bool:
    """Whether the word of `peer_id` may count here, or has counted."""
    view, attempt, next_view = state.view, state.attempt, state.next_view
    if view is None or state.others.familiar.holds(peer_id) or peer_id in view.member_ids:
        return True
    if attempt is not None and peer_id in attempt.awaited_ids:
        return True
    if next_view is not None and peer_id in next_view.member_ids:
        return True
    return state.others.views.has_met(peer_id, view.id)


def refusal_of_far(state: AgreementState, message: Gather | Spread) -> str:
    """Why this peer takes no part in the attempt, whatever the message holds; empty: nothing is
    against it. It decides as `entry_verdict` does, by what costs nothing to look at."""
    view, attempt = state.view, state.attempt
    assert view is not None
    if is_under_way(state, message):
        assert attempt is not None
        return "the knowledge is frozen" if attempt.snapshot is not None else ""
    if not message.planned:
        return "its sender is in no view with this peer"
    if state.record is None or message.number <= state.promises.passed_number:
        return "has said Ready to this number, or given it up"
    if attempt is not None and message.number <= attempt.number:
        return f"takes part in {attempt.number}"
    if state.frozen or state.ends_here or state.agreed.vouched is not None:
        return "no planned view is due"
    return "" if message.base == view.id else "it succeeds another view"


def gather_worth_reading(
    state: AgreementState, message: Gather, named_by: NamedBy
) -> Gather | None:
    """The Gather with nothing in it but what members, and those that they name, have signed. None:
    no member has signed anything in it. Raises `PeerFault`."""
    counting, fresh = _counting(state, message, named_by)
    if not counting:
        return None
    return msgspec.structs.replace(
        message,
        contributions=tuple(it for it in fresh if it.peer_id in counting),
        newcomers=tuple(_first_of_each(message.newcomers, counting)),
        certificates=(),
    )


def spread_worth_reading(
    state: AgreementState, message: Spread, named_by: NamedBy
) -> Spread | None:
    """The same of a Spread, which travels along an overlay."""
    counting, fresh = _counting(state, message, named_by)
    if not counting:
        return None
    kept, bodies = tuple(it for it in fresh if it.peer_id in counting), message.bodies
    records = tuple(_first_of_each(bodies.records, counting))
    prepared = tuple(it for it in bodies.prepared if it.peer_id in counting)
    return msgspec.structs.replace(
        message,
        contributions=kept,
        bodies=msgspec.structs.replace(bodies, records=records, prepared=prepared),
        certificates=(),
        ready_sets=tuple(_said_by(message.ready_sets, counting)),
    )


def is_under_way(state: AgreementState, message: Gather | Spread) -> bool:
    """Whether the message is of the attempt in which this peer takes part."""
    at = state.attempt
    if at is None:
        return False
    said = message.number, message.planned, message.base
    return (at.number, at.planned, at.base) == said


def _counting(
    state: AgreementState, message: Gather | Spread, named_by: NamedBy
) -> tuple[frozenset[str], list[Signed]]:
    """Peer ids of those whose contributions may count, if a member has signed any; and the
    contributions that are news."""
    assert state.view is not None
    _require_few_of_each(message)
    members, known, awaited = frozenset(state.view.member_ids), set[Signed](), frozenset[str]()
    if state.attempt is not None and is_under_way(state, message):
        known, awaited = set(state.attempt.known.values()), state.attempt.awaited_ids
    fresh = [signed for signed in message.contributions if signed not in known]
    by_members = [signed for signed in fresh if signed.peer_id in members]
    if not by_members and not awaited:
        return frozenset(), []
    named = {member.peer_id for signed in by_members for member in named_by(signed)}
    return members | awaited | named, fresh


def _require_few_of_each(message: Gather | Spread) -> None:
    count = collections.Counter(signed.peer_id for signed in message.contributions)
    if max(count.values(), default=0) > OF_ONE_LIMIT:
        raise PeerFault("many contributions under one name", message.sender.peer_id)


def _first_of_each(records: Iterable[Signed], counting: frozenset[str]) -> Iterator[Signed]:
    seen = set[str]()
    for signed in records:
        if signed.peer_id in counting and signed.peer_id not in seen:
            seen.add(signed.peer_id)
            yield signed


def _said_by(ready_sets: Iterable[ReadySet], counting: frozenset[str]) -> Iterator[ReadySet]:
    seen = set[str]()
    for ready in ready_sets:
        said = []
        for member, signature in ready.said:
            if member.peer_id in counting and member.peer_id not in seen:
                seen.add(member.peer_id)
                said.append((member, signature))
        if said:
            yield ReadySet(ready.view, ready.plan_digest, ready.members_digest, tuple(said))
