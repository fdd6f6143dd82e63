"""What a work that is computed again here waits for: others say so in no message of their own, and
who is waited for by an auditor would have that one taken for who stands still."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from p2p_dtfm.core.messages.audit_messages import Claimed
from p2p_dtfm.core.messages.work import Kind, Lack
from p2p_dtfm.core.protocol.plan import Plan


class AskedParts:
    """Parts of others' gradients, as they have claimed them, and of whom each is due."""

    def __init__(self) -> None:
        self._due: Counter[Lack] = Counter()

    @property
    def lacks(self) -> tuple[Lack, ...]:
        return tuple(sorted(self._due))

    @contextlib.contextmanager
    def waiting(self, plan: Plan, peer_id: str, claim: Claimed, blob: str) -> Iterator[None]:
        """For a chunk of this peer's, which has another owner than who computes the work again: so
        it is none that it was sent in the step. What else is asked for is no part."""
        due = _part_of(plan, peer_id, claim, blob)
        self._due.update(due)
        try:
            yield
        finally:
            self._due.subtract(due)
            self._due += Counter()


def _part_of(plan: Plan, peer_id: str, claim: Claimed, blob: str) -> list[Lack]:
    digest, segments = bytes.fromhex(blob), plan.segments()
    found = [
        Lack(peer_id, Kind.PART, segments[number].first_layer, chunk)
        for number, parts in claim.share.parts.items()
        for chunk, each in enumerate(parts)
        if each == digest
    ]
    return found if len(found) == 1 else []  # of chunks without gradients it is not known which
