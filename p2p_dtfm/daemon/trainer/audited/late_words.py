"""What a stage-holder tells the others while it waits for audits: it may be that somebody has told
them something else than this peer, and so each would wait for another one."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from p2p_dtfm.core.audit.claim_book import ClaimBook
from p2p_dtfm.core.audit.work import heard_of
from p2p_dtfm.core.messages.audit_messages import COULD_NOT, Audited, ShownClaims
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId

SHOWN_AFTER_S = 1.0
"""Waiting for audits: less than any accusation takes."""
ASKED_AFTER_S = 0.25
"""Waiting for who is to audit in another's place: an honest one mostly has begun by then."""
Tell = Callable[[str, ShownClaims | Audited], None]


class LateWords:
    """Of one step."""

    def __init__(
        self, me: str, view: ViewId, step: int, plan: Plan, book: ClaimBook, tell: Tell
    ) -> None:
        self.book = book
        self._me = me
        self._view = view
        self._step = step
        self._plan = plan
        self._tell = tell
        self._shown: frozenset[str] | None = None
        """Once this peer has shown what it has heard: of whom two things."""
        self._declined = set[tuple[str, str]]()
        """By whom this peer was asked in vain, and for whose work."""

    @contextmanager
    def while_waiting(self, drawn: Mapping[str, str], in_place: bool) -> Iterator[None]:
        """For the audits of these. `in_place`: of others, who could not."""
        loop = asyncio.get_running_loop()
        calls = [loop.call_later(SHOWN_AFTER_S, self._show)]
        if in_place:
            calls.append(loop.call_later(ASKED_AFTER_S, self._ask, drawn))
        try:
            yield
        finally:
            for call in calls:
                call.cancel()

    def heard(self) -> None:
        """Something more: somebody has claimed two things, and the others may lack just what came
        here; or somebody waits for this peer in vain."""
        if self.book.unlike():
            self._show()
        for asks, peer_id in sorted(self.book.asked_in_vain(self._me) - self._declined):
            self._declined.add((asks, peer_id))
            self._tell(asks, self._could_not(peer_id))

    def _show(self) -> None:
        """Audits take long: it may be that others have heard another opening, and drawn others."""
        unlike = self.book.unlike()
        if self._shown == unlike.keys():
            return
        self._shown = frozenset(unlike)
        for heard in filter(None, (heard_of(self.book.claims), unlike)):
            for peer_id in self._plan.stage_holders():
                self._tell(peer_id, ShownClaims(self._view, self._step, heard))

    def _ask(self, drawn: Mapping[str, str]) -> None:
        """Who is to audit in another's place may not know it: whoever was drawn has told it that
        all is well, and this peer that it could not judge."""
        silent = self.book.silent(drawn)
        for peer_id, by in drawn.items():
            if by in silent:
                self._tell(by, self._could_not(peer_id))

    def _could_not(self, peer_id: str) -> Audited:
        return Audited(self._view, self._step, peer_id, COULD_NOT)
