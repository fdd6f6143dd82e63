"""What a stage-holder tells the others while it waits for audits: it may be that somebody has told
them something else than this peer, or this peer nothing, and so each would wait for another one."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from p2p_dtfm.core.audit.claim_book import COLLUDERS_DIVISOR, ClaimBook
from p2p_dtfm.core.audit.work import heard_of
from p2p_dtfm.core.messages.audit_messages import UNLIKE_LIMIT, HeardAudit, ShownClaims
from p2p_dtfm.core.messages.work import Kind, Work
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.ports import now

SHOWN_AFTER_S = 1.0
"""Waiting for audits, or computing what is disputed: less than any accusation takes. Then after
twice as long again, and so on."""
ASKED_AFTER_S = 0.25
"""Waiting for who is to audit in another's place: an honest one mostly has begun by then."""
PASSED_ON_AFTER_S = 1.0
"""That somebody says that it lacks a claim: all others may just be on their way to it."""
Tell = Callable[[str, ShownClaims], None]


class LateWords:
    """Of one step."""

    def __init__(
        self,
        me: str,
        view: ViewId,
        step: int,
        plan: Plan,
        book: ClaimBook,
        tell: Tell,
        secret: Callable[[], bytes],
    ) -> None:
        """`secret`: see `ClaimBook.heard_audits`."""
        self.book = book
        self._me = me
        self._view = view
        self._step = step
        self._plan = plan
        self._tell = tell
        self._secret = secret
        self._shown: frozenset[object] = frozenset()
        """Of whom two things, when this peer showed last what it has heard."""
        self._lacking_s: dict[tuple[str, str], float] = {}
        """Since when who says that it lacks whose claim, which has come here."""
        self._passed_on: set[tuple[str, str]] = set()
        """To whom whose claim."""

    @property
    def audits(self) -> tuple[HeardAudit, ...]:
        """What auditors have said, as far as it is heard here."""
        return self.book.heard_audits(self._secret())

    @contextmanager
    def while_waiting(self, instead: Mapping[str, str] | None = None) -> Iterator[None]:
        """For audits, or for what is disputed to be computed again. `instead`: for the audits of
        these, in the place of others, who could not."""
        loop = asyncio.get_running_loop()

        def show(after_s: float) -> None:
            self.show()
            calls[0] = loop.call_later(after_s, show, 2 * after_s)

        calls = [loop.call_later(SHOWN_AFTER_S, show, 2 * SHOWN_AFTER_S)]
        if instead:
            calls.append(loop.call_later(ASKED_AFTER_S, self._ask, instead))
        try:
            yield
        finally:
            for call in calls:
                call.cancel()

    def heard(self) -> None:
        """Something more: somebody has said two things, and the others may lack just what came
        here. Not of each word that somebody adds to that: one is enough for nobody to be waited
        for, and in a message there is room for a few."""
        if self._shown != self.book.contradicted() and len(self._shown) < UNLIKE_LIMIT:
            self.show()
        for peer_id, whose in sorted(self.book.untold - self._passed_on):
            if whose in self.book.claims:
                self._passed_on.add((peer_id, whose))
                self._pass_on(peer_id, whose)

    def answer(self, sender: str, said: ShownClaims) -> None:
        """To one that shows what it has heard: an auditor may have told it nothing."""
        if audits := self.book.lacks_audits(said, self._secret()):
            self._tell(sender, ShownClaims(self._view, self._step, {}, audits))

    def passes_on(self, peer_id: str, work: Work) -> None:
        """The claims that a peer says it lacks, if it says so for long: whoever has told all but
        that one would have it wait, and all others for it. Not all here do so, but some that are
        more than colluders; in this view's next steps as soon as they have heard it, or it would be
        as long in each."""
        is_here = (work.view, work.step) == (self._view, self._step)
        if not is_here or peer_id not in self._plan.stage_holders():
            return
        now_s = now.monotonic_s()
        for lack in work.lacks:
            claim, key = self.book.claims.get(lack.peer_id), (peer_id, lack.peer_id)
            if lack.kind is not Kind.CLAIM or claim is None:
                continue
            began_s = self._lacking_s.setdefault(key, now_s)
            if now_s - began_s >= PASSED_ON_AFTER_S:
                self._lacking_s[key] = math.inf
                self.book.untold.add(key)
                self._passed_on.add(key)
                self._pass_on(*key)

    def _pass_on(self, peer_id: str, whose: str) -> None:
        if self._is_to_pass_on(peer_id, whose):
            whole = {whose: self.book.claims[whose]}
            self._tell(peer_id, ShownClaims(self._view, self._step, {}, whole=whole))

    def _is_to_pass_on(self, peer_id: str, whose: str) -> bool:
        others = sorted(set(self._plan.stage_holders()) - {peer_id, whose})

        def turn(it: str) -> str:
            return digest_bytes(f"{self._step} {peer_id} {whose} {it}".encode())

        return self._me in sorted(others, key=turn)[: 1 + len(others) // COLLUDERS_DIVISOR]

    def show(self) -> None:
        """Audits take long: it may be that others have heard another opening, and drawn others; or
        that an auditor has told them something else, or nothing."""
        self._shown = self.book.contradicted()
        shown = [ShownClaims(self._view, self._step, heard_of(self.book.claims), self.audits)]
        if unlike := self.book.unlike():
            shown.append(ShownClaims(self._view, self._step, unlike))
        for message in shown:
            for peer_id in self._plan.stage_holders():
                self._tell(peer_id, message)

    def _ask(self, instead: Mapping[str, str]) -> None:
        """Who is to audit in another's place may not know it: whoever was drawn has told it that
        all is well, and this peer that it could not judge."""
        for peer_id in self.book.silent(instead):
            self._tell(peer_id, ShownClaims(self._view, self._step, {}, self.audits))
