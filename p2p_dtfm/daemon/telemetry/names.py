"""What to call peers where people read: by name, and by id only where somebody asks for ids."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from p2p_dtfm.core.protocol.names import (
    distinct,
    fault_of_name,
    generated_name,
    marked,
    sounds,
)
from p2p_dtfm.core.protocol.records import PeerRecord

PEER_ID = re.compile(r"\b(?:12D3KooW[1-9A-HJ-NP-Za-km-z]{44}|Qm[1-9A-HJ-NP-Za-km-z]{44})\b")
_SPOKEN_OF = re.compile(rf"(?<![/(\w]){PEER_ID.pattern}")
"""Not within an address, which is to be copied whole, nor where it explains a name in brackets."""


class Names:
    """Of the members of the last view, and of whoever else is spoken of."""

    def __init__(self, called: Mapping[str, str] | None = None) -> None:
        self._called = dict(called or {})
        self._heard: dict[str, str] = {}
        """Of others, as they say themselves: nobody is both here and called."""
        self._count = Counter(map(sounds, self._called.values()))
        """Of the names of all, by what they sound like."""

    def learn(self, records: Iterable[PeerRecord]) -> None:
        """These are the members now. Those before keep their names, unless one is taken."""
        members = distinct({record.peer_id: record.called for record in records})
        taken = set(members.values())
        before = {peer: name for peer, name in self._called.items() if name not in taken}
        self._heard = {peer: name for peer, name in self._heard.items() if name not in taken}
        self._set_called(dict(list(before.items())[-_FORMER_KEPT:]) | members)

    def own(self, peer_id: str, name: str) -> None:
        """This peer's, before it is a member; empty: none is given."""
        self._set_called({**self._called, peer_id: name or generated_name(peer_id)})

    def hear(self, peer_id: str, name: str) -> None:
        """What one that was no member yet, or is none, says that it is called; what no record may
        hold is not heard. Alike as another's it is told apart."""
        if fault_of_name(name) or peer_id in self._called:
            return
        self._forget(peer_id)
        put = marked(name, peer_id) if self._count[sounds(name)] else name
        self._heard[peer_id] = put
        self._count[sounds(put)] += 1
        while len(self._heard) > _FORMER_KEPT:
            self._forget(next(iter(self._heard)))

    def _forget(self, peer_id: str) -> None:
        if (name := self._heard.pop(peer_id, None)) is not None:
            sound = sounds(name)
            self._count[sound] -= 1
            if not self._count[sound]:
                del self._count[sound]

    def _set_called(self, called: dict[str, str]) -> None:
        self._called = called
        self._heard = {peer: name for peer, name in self._heard.items() if peer not in called}
        self._count = Counter(map(sounds, (*self._heard.values(), *called.values())))

    def of(self, peer_id: str) -> str:
        """Also of one that was never met: what its identity makes."""
        called = self._called.get(peer_id) or self._heard.get(peer_id)
        return called or generated_name(peer_id)

    def in_text(self, text: str) -> str:
        """With names for ids. What a name looks like is its owner's choice: text of strangers."""
        return _SPOKEN_OF.sub(lambda found: self.of(found[0]), text)


_FORMER_KEPT = 256
