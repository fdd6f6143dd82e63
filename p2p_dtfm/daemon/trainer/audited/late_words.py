"""What a stage-holder tells the others while it waits for audits. Somebody may have told them
something else than this peer, or told this peer nothing. Then each would wait for another one."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from p2p_dtfm.core.audit.claim_book import ClaimBook
from p2p_dtfm.core.audit.draw import COLLUDERS_DIVISOR
from p2p_dtfm.core.audit.work import heard_of
from p2p_dtfm.core.messages.audit_messages import UNLIKE_LIMIT, HeardAudit, ShownClaims
from p2p_dtfm.core.messages.work import Kind, Work
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.ports import now

SHOWN_AFTER_S = 1.0
"""How long this peer waits for audits, or computes what is disputed, before it shows what it has
heard: less than any accusation takes. It shows it again after twice as long, and so on."""
ASKED_AFTER_S = 0.25
"""How long this peer waits for one that is to audit in another's place, before it tells that one
so. An honest one mostly has begun by then."""
PASSED_ON_AFTER_S = 1.0
"""How long a peer says that it lacks a claim before the claim is passed on to it. Until then all
claims may just be on their way."""
Tell = Callable[[str, ShownClaims], None]


class LateWords:
    """What is told late in one step."""

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
        """The contradictions that were known when this peer last showed what it has heard."""
        self._lacking_s: dict[tuple[str, str], float] = {}
        """By a peer and another: since when the peer says that it lacks the other's claim, which
        has come here."""
        self._passed_on: set[tuple[str, str]] = set()
        """Pairs: a member, and another whose claim this peer has passed on to it."""

    @property
    def audits(self) -> tuple[HeardAudit, ...]:
        """What auditors have said, as far as it is heard here."""
        return self.book.heard_audits(self._secret())

    @contextmanager
    def while_waiting(self, instead: Mapping[str, str] | None = None) -> Iterator[None]:
        """While this peer waits for audits, or for disputed work to be computed again. `instead`:
        by member, who audits it in the place of an auditor that could not."""
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
        """Something more is heard. Where somebody has said two things, the others may lack just
        what came here, so this peer shows it. It does not show each further word of such a member:
        one is enough for nobody to be waited for, and a message has room for a few. Claims that
        members are known to lack are passed on."""
        if self._shown != self.book.contradicted() and len(self._shown) < UNLIKE_LIMIT:
            self.show()
        for peer_id, whose in sorted(self.book.untold - self._passed_on):
            if whose in self.book.claims:
                self._passed_on.add((peer_id, whose))
                self._pass_on(peer_id, whose)

    def answer(self, sender: str, said: ShownClaims) -> None:
        """Tell a member that shows what it has heard what it lacks: an auditor may have told it
        nothing."""
        if audits := self.book.lacks_audits(said, self._secret()):
            self._tell(sender, ShownClaims(self._view, self._step, {}, audits))

    def passes_on(self, peer_id: str, work: Work) -> None:
        """Pass on the claims that a peer has long said it lacks. A liar that tells its claim to all
        but one member would make that member wait, and all others for it. Not all stage-holders
        pass a claim on, but more of them than there can be colluders. In this view's next steps
        they do so as soon as they have heard it, or each step would take as long."""
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

        may_collude = (len(others) + len(self._plan.spares)) // COLLUDERS_DIVISOR
        return self._me in sorted(others, key=turn)[: 1 + may_collude]

    def show(self) -> None:
        """Show all stage-holders what this peer has heard. Audits take long: others may have heard
        another opening, and drawn other auditors; or an auditor may have told them something else,
        or nothing."""
        self._shown = self.book.contradicted()
        shown = [ShownClaims(self._view, self._step, heard_of(self.book.claims), self.audits)]
        if unlike := self.book.unlike():
            shown.append(ShownClaims(self._view, self._step, unlike))
        for message in shown:
            for peer_id in self._plan.stage_holders():
                self._tell(peer_id, message)

    def _ask(self, instead: Mapping[str, str]) -> None:
        """Tell those that are to audit in another's place. They may not know it: the auditor that
        was drawn may have told them that all is well, and this peer that it could not judge."""
        for peer_id in self.book.silent(instead):
            self._tell(peer_id, ShownClaims(self._view, self._step, {}, self.audits))
