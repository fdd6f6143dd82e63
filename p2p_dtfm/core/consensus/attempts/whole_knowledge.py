"""All that a peer knows in an attempt, as messages; and who is told all of it at once."""

import msgspec

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.message_parts import message_parts
from p2p_dtfm.core.messages.agreement_messages import Gather

MEDIATORS = 2


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


def whole_knowledge(attempt: Attempt, proofs: bool) -> list[Gather]:
    """`proofs`: with what shows to others which views there are."""
    newcomers, certificates = attempt.passed_on.newcomers, attempt.passed_on.certificates
    first = msgspec.structs.replace(
        attempt.gather(),
        newcomers=tuple(newcomers[member] for member in sorted(newcomers)),
        certificates=tuple(certificates.values()) if proofs else (),
    )
    told = [attempt.known[member] for member in sorted(attempt.known)]
    contradicted = attempt.set_aside.contradicted
    told += [contradicted[member] for member in sorted(contradicted)]
    size = sum(len(signed.payload) for signed in first.newcomers)
    parts = message_parts(told, lambda signed: len(signed.payload), size)
    return [
        msgspec.structs.replace(first if n == 0 else attempt.gather(), contributions=tuple(part))
        for n, part in enumerate(parts)
    ]
