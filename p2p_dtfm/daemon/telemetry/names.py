"""What to call peers where people read: by name, and by id only where somebody asks for ids."""

import re
from collections.abc import Iterable, Mapping

from p2p_dtfm.core.protocol.names import distinct, generated_name
from p2p_dtfm.core.protocol.records import PeerRecord

PEER_ID = re.compile(r"\b(?:12D3KooW[1-9A-HJ-NP-Za-km-z]{44}|Qm[1-9A-HJ-NP-Za-km-z]{44})\b")
_SPOKEN_OF = re.compile(rf"(?<![/(\w]){PEER_ID.pattern}")
"""Not within an address, which is to be copied whole, nor where it explains a name in brackets."""


class Names:
    """Of the members of the last view, and of whoever else is spoken of."""

    def __init__(self, called: Mapping[str, str] | None = None) -> None:
        self._called = dict(called or {})

    def learn(self, records: Iterable[PeerRecord]) -> None:
        """These are the members now. Those before keep their names, unless one is taken."""
        members = distinct({record.peer_id: record.called for record in records})
        taken = set(members.values())
        before = {peer: name for peer, name in self._called.items() if name not in taken}
        self._called = dict(list(before.items())[-_FORMER_KEPT:]) | members

    def own(self, peer_id: str, name: str) -> None:
        """This peer's, before it is a member; empty: none is given."""
        self._called[peer_id] = name or generated_name(peer_id)

    def of(self, peer_id: str) -> str:
        """Also of one that was never met: what its identity makes."""
        return self._called.get(peer_id) or generated_name(peer_id)

    def in_text(self, text: str) -> str:
        """With names for ids. What a name looks like is its owner's choice: text of strangers."""
        return _SPOKEN_OF.sub(lambda found: self.of(found[0]), text)


_FORMER_KEPT = 256
