"""All that a peer knows in an attempt, as messages; and who is told all of it at once."""

import msgspec

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.message_parts import message_parts
from p2p_dtfm.core.messages.agreement_messages import Gather
from p2p_dtfm.core.protocol.signed import Signed

MEDIATORS = 2
RECORDS_LIMIT = 64
RECORDS_LIMIT_BYTES = 192 * 1024
"""Newcomers' records in one message, by number and bytes; it may hold other things beside them."""


def ends_that_lack(attempt: Attempt) -> tuple[str, ...]:
    """Peer ids of both ends of each cut link: they lack each other's contribution.

    A resend would bring it half a second later. So two peers that have both contributions, and are
    in no doubt, tell both ends now, once for each link.
    """
    mediated, ends = attempt.passed_on.mediated, set[str]()
    in_doubt = {end for link in attempt.charges for end in (link.by, link.of)}
    if attempt.me not in sorted(attempt.known.keys() - in_doubt)[:MEDIATORS]:
        return ()
    for link in attempt.charges.keys() - mediated:
        if link.by in attempt.known and link.of in attempt.known:
            mediated.add(link)
            ends |= {link.by.peer_id, link.of.peer_id}
    return tuple(sorted(ends))


def late_knowledge(attempt: Attempt) -> list[Gather]:
    """What this peer knows, by its digest, for those that have the contributions.

    Added are contributions that came after this peer said that it waits for nobody, and second ones
    of the same member. Others may have gone on by that word. So a peer that then knows something
    else has to show what.
    """
    passed_on, known = attempt.passed_on, list(attempt.known.values())
    late = known[passed_on.said_all_of :] if passed_on.said_all_of else []
    late += attempt.set_aside.contradicted.values() if passed_on.said_all_of else ()
    if not attempt.is_waiting:
        passed_on.said_all_of = len(known)
    parts = message_parts(late, lambda signed: len(signed.payload))
    return [msgspec.structs.replace(attempt.gather(), contributions=tuple(it)) for it in parts]


def whole_knowledge(attempt: Attempt, proofs: bool) -> list[Gather]:
    """All that this peer knows. `proofs`: with the certificates that prove to others which views
    there are."""
    newcomers, certificates = attempt.passed_on.newcomers, attempt.passed_on.certificates
    records, *more = _in_parts([newcomers[member] for member in sorted(newcomers)])
    first = msgspec.structs.replace(
        attempt.gather(),
        newcomers=tuple(records),
        certificates=tuple(certificates.values()) if proofs else (),
    )
    told = [attempt.known[member] for member in sorted(attempt.known)]
    contradicted = attempt.set_aside.contradicted
    told += [contradicted[member] for member in sorted(contradicted)]
    size = sum(len(signed.payload) for signed in first.newcomers)
    parts = message_parts(told, lambda signed: len(signed.payload), size)
    messages = [
        msgspec.structs.replace(first if n == 0 else attempt.gather(), contributions=tuple(part))
        for n, part in enumerate(parts)
    ]
    rest = (msgspec.structs.replace(attempt.gather(), newcomers=tuple(part)) for part in more)
    return [*messages, *rest]


def _in_parts(records: list[Signed]) -> list[list[Signed]]:
    """Newcomers' records in parts, at least one. Each member names others, and strangers choose
    whom they ask: together they are more than one message may hold."""
    parts: list[list[Signed]] = [[]]
    size = 0
    for signed in records:
        size += len(signed.payload)
        if parts[-1] and (size > RECORDS_LIMIT_BYTES or len(parts[-1]) == RECORDS_LIMIT):
            parts.append([])
            size = len(signed.payload)
        parts[-1].append(signed)
    return parts
