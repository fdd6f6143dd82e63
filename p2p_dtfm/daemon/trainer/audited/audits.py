"""Between a step's work and its Prepared, in a run whose spec asks for audits.

Every stage-holder claims what it has done. What all open with their claims draws whose work is
computed again, and by whom. Where an auditor comes to something else, all compute that work again
that have the stage's parameters or are lent them. Prepared says what they have found, and most of
them decide (`core.audit.accounts`). Nothing of it is kept for later steps: what is found wrong does
not commit.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

from p2p_dtfm.core.audit.accounts import GONE_LIMIT
from p2p_dtfm.core.audit.boundaries import TRAINING
from p2p_dtfm.core.audit.claim_book import ClaimBook, commitment_to
from p2p_dtfm.core.audit.told_losses import stated_losses
from p2p_dtfm.core.audit.work import (
    GONE_WORK,
    OPENING_BYTES,
    SENT_OTHER,
    changed_work,
    excused_by,
    heard_of,
    norms_alone,
    norms_made,
    openings_digest,
    signed_audit,
    signed_claim,
    stated_work,
    sums_of_others,
)
from p2p_dtfm.core.commit.step_terms import StepTerms, terms_of
from p2p_dtfm.core.membership.bars import barred_at
from p2p_dtfm.core.messages.audit_messages import (
    COULD_NOT,
    Account,
    Audited,
    Claimed,
    Share,
    ShownClaims,
)
from p2p_dtfm.core.messages.work import Kind, Lack, Work
from p2p_dtfm.core.protocol.canonical import encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Verify
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.step.mailbox import segments_of
from p2p_dtfm.daemon.step.stage_account import (
    StageAccount,
    edges_of,
    got_by_holder,
    losses_told,
)
from p2p_dtfm.daemon.step.step_engine import LocalResult, StepEngine
from p2p_dtfm.daemon.trainer.audited.late_words import SHOWN_AFTER_S, LateWords
from p2p_dtfm.daemon.trainer.audited.recomputing import OfferStates, OpenStep, Recomputing
from p2p_dtfm.daemon.trainer.audited.stopped_steps import DENIED, StoppedSteps
from p2p_dtfm.daemon.trainer.early_words import EarlyWords
from p2p_dtfm.daemon.trainer.trainer_state import Outlet, Stopped, Tools, TrainerState
from p2p_dtfm.ports import chance, now
from p2p_dtfm.train.stage.replay.arithmetic import arithmetic_name, threads_here

Missing = Callable[[], tuple[str, ...]]
Waits = Callable[[], tuple[Lack, ...]]

log = logging.getLogger("p2p_dtfm")


class Audits:
    """`account` for each step of which something is due; `receive` what others claim and find."""

    def __init__(
        self, tools: Tools, outlet: Outlet, state: TrainerState, offer_states: OfferStates
    ) -> None:
        self._tools = tools
        self._outlet = outlet
        self._state = state
        self._offer_states = offer_states
        self._rate = tools.spec.audit.rate_millionths
        self._book: ClaimBook | None = None
        self._early = EarlyWords[Claimed | Audited]()
        self._mine: StageAccount | None = None
        """This peer's account of the open step, once it is claimed."""
        self._here: OpenStep | None = None
        """The open step, from its claim on."""
        self._next_opening = b""
        self._stopped = StoppedSteps(tools)
        self._waits_for: Waits = tuple
        self._recomputing = Recomputing(tools, outlet, state, self.find, offer_states)
        self._given: set[tuple[Kind, int]] = set()

    @cached_property
    def _terms(self) -> StepTerms:
        return terms_of(self._tools.spec)

    # what others say ----------------------------------------------------------------------------

    def receive(self, sender: str, said: Claimed | Audited) -> None:
        """Take in another's claim or audit. Raises `PeerFault`."""
        if not self._rate:
            raise PeerFault("an audit in a run without audits", sender)
        book, view = self._book, self._state.view
        if book is not None and said.view == book.view:
            try:
                book.record(sender, said)
            finally:  # what is refused may be the second thing that somebody claims
                self._note_heard()
                self._state.wake.set()
        elif view is None or said.view.number >= view.id.number:
            self._early.keep(sender, said, len(encode_for_wire(said)))

    def show(self, sender: str, said: ShownClaims, verify: Verify) -> None:
        """Take in what another member has heard claimed. Raises `PeerFault`."""
        if not self._rate:
            raise PeerFault("claims in a run without audits", sender)
        if self._book is not None and said.view == self._book.view:
            self._book.show(sender, said, verify)
            self._note_heard()
            if self._here is not None and self._here.book is self._book:
                self._here.words.answer(sender, said)
            self._state.wake.set()

    def hear_work(self, sender: str, work: Work) -> None:
        """Take in what another member says that it lacks."""
        if self._here is not None and self._here.book is self._book:
            self._here.words.passes_on(sender, work)

    def _note_heard(self) -> None:
        if self._here is not None and self._here.book is self._book:
            self._here.words.heard()

    def find(self, digest: str) -> bytes | memoryview | None:
        """The bytes with this digest, while the step is open: a chunk of this peer's own gradient
        as claimed, a frame that it has sent, or parameters of its layers."""
        return None if self._mine is None else self._mine.find(digest)

    def forget(self) -> None:
        """The gradients are about to be overwritten."""
        self._mine = self._here = None

    def lacks(self, view: ViewId) -> tuple[Lack, ...]:
        """The claims and audits that a step waits for; else the tensors that a recomputation here
        waits for."""
        is_here = self._book is not None and self._book.view == view
        return self._waits_for() or self._recomputing.lacks if is_here else ()

    @property
    def fetches(self) -> bool:
        """Whether this peer fetches layers that are lent to it, or the data of a stage that it does
        not hold."""
        return self._recomputing.fetches

    def borrowers(self, view: ViewId) -> Mapping[str, int]:
        """The members that now compute works of stages that they do not hold, each with how
        many."""
        book = self._book
        return book.borrowers() if book is not None and book.view == view else {}

    def disputes(self, view: ViewId) -> Mapping[str, tuple[str, ...]]:
        """By member, the others whose works it computes again because they are disputed."""
        book = self._book
        return book.disputes() if book is not None and book.view == view else {}

    def has_given(self, kind: Kind, step: int) -> bool:
        """Whether this peer has said its own claim or audits, if any are to be said."""
        return not self._rate or (kind, step) in self._given

    # a step -------------------------------------------------------------------------------------

    async def account(
        self, view: View, plan: Plan, step: int, engine: StepEngine, local: LocalResult
    ) -> Account | None:
        """What Prepared is to say; None in a run without audits. Raises `Stopped`."""
        if (mine := local.account) is None:
            return None
        book, me = self._book_of(view, plan), self._tools.me
        lineage, wire = self._outlet.lineage_at(step), engine.mailbox.wire
        self._stopped.begins(step, lineage, wire, view.members)
        book.step_begins(step)
        self._given = set()
        try:
            self._mine = mine
            tell, secret = self._tools.net.messenger.tell, lambda: self._next_opening
            words = LateWords(me, view.id, step, plan, book, tell, secret)
            self._here = here = OpenStep(view, plan, step, engine, book, mine, words)
            claim = signed_claim(await self._claim(here, local), me, self._tools.net.sign)
            book.sums = sums_of_others(me, plan.segments(), local.sums, local.norms)
            self._say(here, claim)
            self._given.add((Kind.CLAIM, step))
            await self._until(view, Kind.CLAIM, book.not_claimed)
            self._tools.status.facts["arithmetics"] = book.arithmetics()
            await self._true_openings(here)
            found = await self._audited(here)
            disputed, unlike_norms = book.disputed(), book.unlike_norms()
            for peer_id in disputed:
                if peer_id in unlike_norms:
                    log.warning("others state another norm of what %s has summed", peer_id)
                else:
                    log.warning("%s has computed something else than was claimed", peer_id)
                if peer_id not in found and book.may_judge(me, peer_id):
                    with words.while_waiting():
                        found[peer_id] = await self._recomputing.work_of(here, peer_id)
            told, denied = await self._denied(here, found, disputed)
            openings, unlike = openings_digest(claim.opening, claim.commitment), book.unlike()
            heard = heard_of(book.claims)
            return Account(claim.share, heard, told, denied, openings, unlike, words.audits)
        finally:
            self._waits_for = tuple

    async def _audited(self, here: OpenStep) -> dict[str, bytes]:
        """What this peer finds of those that it was drawn to audit, once all auditors have said
        what they find."""
        book, found, me = here.book, dict[str, bytes](), self._tools.me
        for in_place in (False, True):
            draws = book.drawn_instead() if in_place else book.rounds()
            mine = {it for drawn in draws for it, by in drawn.items() if by == me}
            mine -= found.keys()  # of these this peer has spoken already
            if mine:
                self._given.discard((Kind.AUDIT, here.step))
            for peer_id in sorted(mine):
                found[peer_id] = work = await self._recomputing.work_of(here, peer_id)
                said = Audited(here.view.id, here.step, peer_id, work)
                self._say(here, signed_audit(said, me, self._tools.net.sign))
            self._given.add((Kind.AUDIT, here.step))
            for drawn in draws:
                with here.words.while_waiting(drawn if in_place else None):
                    await self._until(here.view, Kind.AUDIT, partial(book.silent, drawn))
        return found

    async def _denied(
        self, here: OpenStep, found: Mapping[str, bytes], disputed: Sequence[str]
    ) -> tuple[dict[str, bytes], dict[str, bool]]:
        """What works come to, as this peer's account tells it; and which claims the account
        denies."""
        claims = here.book.claims
        told = {it: work for it, work in found.items() if work != COULD_NOT}
        denied = {it: told.get(it, claims[it].work) != claims[it].work for it in disputed}
        unlike = here.book.unlike_to(self._tools.me)
        for it in unlike:
            log.warning("%s has sent something else than it claims", it)
        otherwise = dict.fromkeys(unlike, SENT_OTHER) | await self._otherwise_before(here)
        for it, work in otherwise.items():
            if work != SENT_OTHER or not denied.get(it):  # what the work comes to says more
                told[it], denied[it] = work, True
        for it, other in self._stopped.excused(here.plan, claims).items():
            if it not in denied:  # likewise
                log.warning("%s says that it had got something else from %s before", it, other)
                told[it] = excused_by(other)
        return told, denied

    async def _otherwise_before(self, here: OpenStep) -> dict[str, bytes]:
        """Members whose work of this step was another, or false, in a view that ended before it was
        known; and what is said of each."""
        found, claims = dict[str, bytes](), here.book.claims
        for peer_id in self._stopped.changed(here.plan, claims):
            log.warning("%s claims another work than it did before the step was stopped", peer_id)
            found[peer_id] = changed_work(claims[peer_id].work)
        barred, states = barred_at(here.view.snapshot.bars, here.step), here.engine.states
        for peer_id in sorted(self._stopped.sent_other().difference(found, barred)):
            log.warning("%s had sent something else than it claimed before", peer_id)
            found[peer_id] = SENT_OTHER
        for it in self._stopped.unjudged(here.view, here.plan, claims, barred, states):
            if await self._recomputing.of_before(here, it, self._stopped) == DENIED:
                log.warning("the work of %s was false before the step was stopped", it.peer_id)
                stays = it.peer_id in claims
                found[it.peer_id] = changed_work(claims[it.peer_id].work) if stays else GONE_WORK
        too_many = sorted(found.keys() - set(here.plan.stage_holders()))[GONE_LIMIT:]
        return {it: work for it, work in found.items() if it not in too_many}

    def _book_of(self, view: View, plan: Plan) -> ClaimBook:
        """The claims of this view, with those that came before this peer had taken over."""
        if self._book is not None and self._book.view == view.id:
            return self._book
        self._stopped.view_is_over(self._book)
        due, kept = partial(self._terms.due, plan=plan), self._terms.kept_microbatches
        self._book = book = ClaimBook(view.id, plan, self._rate, kept, view.snapshot.bars, due)
        self._next_opening = b""
        book.step_begins(self._state.step)
        for sender, said in self._early.take():
            if said.view == view.id:
                with contextlib.suppress(PeerFault):
                    book.record(sender, said)
        return book

    async def _claim(self, here: OpenStep, local: LocalResult) -> Claimed:
        me, plan, engine = self._tools.me, here.plan, here.engine
        places = {n: segment.holders.index(me) for n, segment in segments_of(plan, me).items()}
        sums = {number: digests[places[number]] for number, digests in local.sums.items()}
        device = next(iter(engine.states.values())).device
        due, wire = self._terms.due(here.step, plan) or TRAINING, engine.mailbox.wire
        edges = edges_of(plan, me, engine.work, due)
        own = stated_losses(edges, local.loss_sum, local.held_out_loss_sum)
        opening = self._next_opening or chance.token_bytes(OPENING_BYTES)
        self._next_opening = chance.token_bytes(OPENING_BYTES)
        share = Share(
            arithmetic=arithmetic_name(device) if engine.work.runner.repeats_bits else "",
            threads=await self._tools.compute.run(partial(threads_here, device)),
            parts=here.mine.parts,
            got=got_by_holder(plan, wire, me, local.got) if due.trains else {},
            edges=edges,
            parameters=dict(here.mine.parameters),
            losses=losses_told(plan, me, here.step, engine.mailbox, own) if due.trains else {},
            norms=local.norms,
        )
        is_mixed, segments = bool(local.tied), plan.segments()
        alone = norms_alone(me, segments, local.squared_norms, is_mixed=is_mixed)
        made = norms_made(me, segments, local.norms)
        work = stated_work(share, local.loss_sum, local.held_out_loss_sum, sums, alone, made)
        next_one = commitment_to(self._next_opening)
        return Claimed(here.view.id, here.step, share, work, opening, next_one)

    def _say(self, here: OpenStep, said: Claimed | Audited) -> None:
        here.book.record(self._tools.me, said)
        here.words.heard()  # others may have claimed before
        for peer_id in here.plan.stage_holders():  # a spare has no part in it
            self._tools.net.messenger.tell(peer_id, said)

    async def _until(self, view: View, kind: Kind, missing: Missing) -> None:
        """Wait until nobody's claim, or audit, is missing. Raises `Stopped`.

        A member that is waited for may still take its place, and wait for states from here, or for
        a word about them.
        """
        while not self._state.is_over(view):
            late = missing()
            self._waits_for = lambda: tuple(Lack(peer_id, kind) for peer_id in missing())
            if not late:
                self._tools.status.facts["waits_for"] = []  # what is computed next takes long
                return
            self._tools.status.facts["waits_for"] = list(late)
            await self._offer_states()
            await self._state.wait()
        raise Stopped

    async def _true_openings(self, here: OpenStep) -> None:
        """Where an opening is false, or a claim names what nobody changes otherwise, show the
        claims to the others. A member that has claimed another thing to the others has signed that
        as well. Shown to each other the two claims convict it, and nobody accuses it alone.

        Where no second claim turns up, this peer accuses the member. Then it raises `Stopped` once
        the others have agreed on how to go on.
        """
        book, state = here.book, self._state
        if not book.impossible():
            return
        here.words.show()
        ends_s = now.monotonic_s() + SHOWN_AFTER_S
        while faults := self._not_shown(book):
            if state.is_over(here.view) or (left_s := ends_s - now.monotonic_s()) <= 0:
                break
            await state.wait(left_s)
        for peer_id, cause in faults.items():
            self._outlet.poison(peer_id, cause)
        if faults:
            await state.until_over(here.view)

    def _not_shown(self, book: ClaimBook) -> dict[str, str]:
        """By member, what is false in its claim, if no other claim of the member is known here."""
        known = book.contradicted()
        return {it: cause for it, cause in book.impossible().items() if it not in known}
