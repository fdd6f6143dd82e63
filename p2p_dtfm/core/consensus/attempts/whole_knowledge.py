"""All that a peer knows in an attempt, as messages; and who is told all of it at once."""

import msgspec

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.message_parts import message_parts
from p2p_dtfm.core.messages.agreement_messages import Gather
from p2p_dtfm.core.protocol.signed import Signed

MEDIATORS = 2
RECORDS_LIMIT = 64
RECORDS_LIMIT_BYTES = 192 * 1024
"""Of newcomers, in one message, which may have others beside them."""


def ends_that_lack(attempt: Attempt) -> tuple[str, ...]:
    """Where a link is cut, its ends lack each other's contribution, and a resend would bring it
    half a second later: two of those that have both, and are in no doubt, tell both ends now, of
    each link once."""
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
    """That this peer knows what it knows, for those that have the contributions; with those that
    came after it has said that it waits for nobody, and second ones. By that word others may have
    gone on, and who then knows something else has to show what."""
    passed_on, known = attempt.passed_on, list(attempt.known.values())
    late = known[passed_on.said_all_of :] if passed_on.said_all_of else []
    late += attempt.set_aside.contradicted.values() if passed_on.said_all_of else ()
    if not attempt.is_waiting:
        passed_on.said_all_of = len(known)
    parts = message_parts(late, lambda signed: len(signed.payload))
    return [msgspec.structs.replace(attempt.gather(), contributions=tuple(it)) for it in parts]


def whole_knowledge(attempt: Attempt, proofs: bool) -> list[Gather]:
    """`proofs`: with what shows to others which views there are."""
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
    """Each member names others, and strangers choose whom they ask: together they are more than
    one message may hold. At least one part."""
    parts: list[list[Signed]] = [[]]
    size = 0
    for signed in records:
        size += len(signed.payload)
        if parts[-1] and (size > RECORDS_LIMIT_BYTES or len(parts[-1]) == RECORDS_LIMIT):
            parts.append([])
            size = len(signed.payload)
        parts[-1].append(signed)
    return parts
