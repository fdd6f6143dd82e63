"""All that a peer knows in an attempt, as messages."""

import msgspec

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.message_parts import message_parts
from p2p_dtfm.core.messages.agreement_messages import Gather


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
