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
"""No id within an address, which is to be copied whole, nor one that explains a name in
brackets."""


class Names:
    """Names of the members of the last view, and of others that are spoken of."""

    def __init__(self, called: Mapping[str, str] | None = None) -> None:
        self._called = dict(called or {})
        self._heard: dict[str, str] = {}
        """Names of others, as they say themselves: nobody is both here and among the called."""
        self._count = Counter(map(sounds, self._called.values()))
        """How many names of all sound alike, by their sound."""

    def learn(self, records: Iterable[PeerRecord]) -> None:
        """These are the members now. Former members keep their names, unless a member has taken
        one."""
        members = distinct({record.peer_id: record.called for record in records})
        taken = set(members.values())
        before = {peer: name for peer, name in self._called.items() if name not in taken}
        self._heard = {peer: name for peer, name in self._heard.items() if name not in taken}
        self._set_called(dict(list(before.items())[-_FORMER_KEPT:]) | members)

    def own(self, peer_id: str, name: str) -> None:
        """This peer's name before it is a member; empty if none is given."""
        self._set_called({**self._called, peer_id: name or generated_name(peer_id)})

    def hear(self, peer_id: str, name: str) -> None:
        """What a peer says it is called that is no member, or not yet. A name that no record may
        hold is not heard; one that sounds like another's is marked."""
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
        """The name of any peer. For one that was never met it is what its identity makes."""
        called = self._called.get(peer_id) or self._heard.get(peer_id)
        return called or generated_name(peer_id)

    def in_text(self, text: str) -> str:
        """The text with names for ids. A name looks as its owner chooses: it is a stranger's
        text."""
        return _SPOKEN_OF.sub(lambda found: self.of(found[0]), text)


_FORMER_KEPT = 256
