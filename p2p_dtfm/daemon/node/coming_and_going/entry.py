"""The way of a peer in no view to its first view: it is let in, founds, or goes on alone."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from p2p_dtfm.core.consensus.views.view_precedence import is_shown_by_most
from p2p_dtfm.core.membership.fellows import FELLOWS_WAIT_NS
from p2p_dtfm.core.messages.agreement_messages import JoinRequest
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.acquaintances import LOOK_AGAIN_LIMIT_S, LOOK_AGAIN_S
from p2p_dtfm.daemon.node.membership import TICK_S
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.peers.member_search import Found
from p2p_dtfm.daemon.peers.messenger import PEERS_LIMIT
from p2p_dtfm.daemon.peers.run_source import OtherProtocol, RunComplete, shows_end
from p2p_dtfm.daemon.peers.self_record import links_are_measured
from p2p_dtfm.daemon.peers.wire import Barred, KnownPeers
from p2p_dtfm.daemon.telemetry.problems import BARRED
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.ports import now

log = logging.getLogger("p2p_dtfm")

LINKS_WAIT_S = 8.0
FOUNDS_AFTER_S = 4 * LOOK_AGAIN_S
"""Once the pause between two looks in vain has grown to this, a peer that may found goes on
alone."""
GOES_ALONE_AFTER_S = 60.0
"""How long a peer that was in a view and may found sees nobody in a view, until it goes on by
itself."""
JOIN_RETRY_S = 1.0
GONE_AFTER_S = 60.0
PATIENT_TURNS = 30
REFUSALS_LIMIT = 5
"""Refusals in a row of one member, until this peer looks for others before it asks that one
again."""
REMIND_EVERY = 2
"""A peer that waits for an agreed view asks one of its members again every second turn."""
REASON_CHARACTERS = 200
"""So much is shown of a reason that a member states."""
BARRED_FIX = (
    "nothing before that step: this daemon goes on asking. If it is as it was released, look for "
    "faulty memory or an overclocked processor"
)


class Entry:
    """Brings a peer in no view to its first view."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._membership = participant.membership
        self._local = participant.local
        self._network = participant.network
        self._complete: RunComplete | None = None
        """What ends this peer if no member that it may ask lets it in."""
        self._ends: dict[str, None] = {}
        """Members that have shown the end of the run, since a member last let others in."""
        self._as_new: dict[str, None] = {}
        """Peers that ask to be let in themselves, and have nothing that shows the end."""
        self._sees_view = False
        """Somebody has a view, while this peer waits for those that it would begin with."""
        self._alone_since_s: float | None = None
        """When this peer first found nobody that lets it in; None once somebody does again."""
        self._refusals: dict[str, int] = {}
        """Refusals in a row, by the peer that refuses to hear this one: it may not be in the run
        itself."""
        self._asks = False
        """Whether members are asked to let this peer in."""
        self._barred = ""
        """Why the member that was asked last says that this peer is barred, in words."""

    async def found(self) -> None:
        """Wait for the expected newcomers, for a bounded time, then make the first view. If there
        is a view already, ask to be let in there: this peer may have been out of its reach for a
        while."""
        looking = self._local.life.spawn(self._find_view())
        await self._wait_for_newcomers_or_view()
        looking.cancel()
        if self._was_found():
            log.info("a view of this run is there: asks to be let in, and founds nothing")
            self._membership.founds = False
            await self.join()
            return
        self._membership.actions.do(self._membership.agreement.found(now.monotonic_ns()))
        await self._join_if_nothing_comes_of_it()

    async def _find_view(self) -> None:
        membership, acquaintances = self._membership, self._membership.acquaintances
        if acquaintances.comes_back and not membership.goes_on_from_own:
            self._learn_of(await acquaintances.find_view(membership.run, membership.agreement.step))
            self._sees_view = True

    async def _wait_for_newcomers_or_view(self) -> None:
        membership, settings, status = self._membership, self._local.settings, self._local.status
        expected = settings.expect_peers
        if not membership.goes_on_from_own:
            await self._wait_for_fellows()
        if membership.has_lost_memory:  # members that know this peer tell it of their view
            membership.agreement.wants_view()
        end_s = now.monotonic_s() + settings.expect_wait_s
        while len(membership.joiners()) + 1 < expected and now.monotonic_s() < end_s:
            if self._was_found():
                return
            present = len(membership.joiners()) + 1
            status.say(State.WAITING, f"{present} of {expected} expected peers are here")
            await asyncio.sleep(TICK_S)
        end_s = min(end_s, now.monotonic_s() + LINKS_WAIT_S)
        while not links_are_measured(membership.joiners()) and now.monotonic_s() < end_s:
            status.say(State.WAITING, "the newcomers measure the links between them")
            await asyncio.sleep(TICK_S)

    async def _join_if_nothing_comes_of_it(self) -> None:
        """Found anew, or join, where founding comes to nothing. The newcomers may be members of
        another view by now. If they show that, this peer asks to be let in there, or hears that the
        run is complete. If nothing shows it, they have only started again, and it founds with those
        that wait."""
        agreement, membership = self._membership.agreement, self._membership
        since_s = now.monotonic_s()
        while agreement.view is None:
            rests = now.monotonic_s() - since_s >= LOOK_AGAIN_S
            if agreement.attempting or agreement.next_view is not None:
                since_s = now.monotonic_s()
            elif rests and membership.joiners() and not agreement.has_heard_of_view:
                membership.actions.do(agreement.found(now.monotonic_ns()))
            elif now.monotonic_s() - since_s >= FOUNDS_AFTER_S:
                log.info("a view of this run is there: asks to be let in")
                self._membership.founds = False
                await self.join()
                return
            await asyncio.sleep(TICK_S)

    def _was_found(self) -> bool:
        """Whether members of the run have shown themselves that this peer was about to found again.
        Members of another version have told it when it looked for them."""
        membership = self._membership
        has_heard = membership.has_lost_memory and membership.agreement.has_heard_of_view
        is_unlike = isinstance(membership.acquaintances.turned_away(), OtherProtocol)
        return self._sees_view or has_heard or is_unlike

    async def _wait_for_fellows(self) -> None:
        """Wait for those that trained with this peer last. After a power cut each comes back as its
        machine starts. Those that are here then go on from the newest state that their disks make
        up."""
        agreement, status = self._membership.agreement, self._local.status
        end_s = now.monotonic_s() + FELLOWS_WAIT_NS / 1e9
        while not self._sees_view and now.monotonic_s() < end_s:
            if not (missing := agreement.missing_fellows):
                return
            status.say(
                State.WAITING,
                f"waits {FELLOWS_WAIT_NS / 1e9:.0f} s at most for {len(missing)} of those that it "
                f"trained with last: they may have newer states than step {agreement.step}",
            )
            await asyncio.sleep(TICK_S)

    async def join(self) -> None:
        """Ask members to be let in until there is a view with this peer. If that is under way, it
        goes on in this life, too."""
        if self._asks:
            return
        self._asks = True
        try:
            await self._ask_until_let_in()
        finally:
            self._asks = False

    async def _ask_until_let_in(self) -> None:
        agreement = self._membership.agreement
        silent: set[str] = set()
        turn, pause_s = 0, LOOK_AGAIN_S
        while agreement.view is None:
            if not agreement.attempting and agreement.next_view is None:
                members = self._worth_asking(silent, turn)
                if members:
                    member = members[turn % len(members)]
                    turn += 1
                    what = self._barred or f"asks {member} to be let in at the next view"
                    self._local.status.say(State.JOINING, what)
                    if await self._ask_to_be_let_in(member, agreement.wants_view()):
                        if member not in self._refusals:
                            pause_s, self._alone_since_s = LOOK_AGAIN_S, None
                    else:
                        silent.add(member)
                        continue
                elif self._complete is not None:
                    self._end_as_complete(self._complete)
                    return
                else:
                    silent.clear()
                    if not await self._find_others(pause_s):
                        pause_s = min(2 * pause_s, LOOK_AGAIN_LIMIT_S)
            elif (agreed := agreement.next_view) is not None and not agreement.attempting:
                turn += 1
                await self._say_that_it_waits(agreed, turn)
                if (complete := self._ended_meanwhile(agreed)) is not None:
                    self._end_as_complete(complete)
                    return
            await asyncio.sleep(JOIN_RETRY_S)

    def _ended_meanwhile(self, agreed: View) -> RunComplete | None:
        """The end of the run, if most members of the agreed view show it. None if the view was
        given up meanwhile."""
        if self._membership.agreement.next_view is not agreed or self._complete is None:
            return None
        return self._complete if self._shows_most(agreed) else None

    def _end_as_complete(self, complete: RunComplete) -> None:
        """End, or raise `RunComplete`. A peer that comes to a complete run has made a mistake. One
        that trained in it, and only missed its last step, has not."""
        if not self._participant.views:
            raise complete
        log.info("%s, the last of them without this peer", complete.cause)
        log.info("the model: a member that was there has it, p2p-dtfm export writes it")
        self._participant.local.status.say(State.DONE, complete.cause)
        self._participant.local.life.left.set()

    def _shows_most(self, agreed: View) -> bool:
        """Whether most of the other members of the agreed view show the end, or some of very many.
        One alone may show it with nothing but its own word that it has taken the last step."""
        others = set(agreed.member_ids) - {self._membership.me.peer_id, *self._as_new}
        return is_shown_by_most(self._ends, others)

    async def _say_that_it_waits(self, view: View, turn: int) -> None:
        """Ask a member of the agreed view again to be let in. The members may have given that view
        up, as after a silence of this peer. It would then wait as long as any transfer may take.
        If they have not, they take no notice."""
        me = self._membership.me.peer_id
        members = [peer_id for peer_id in view.member_ids if peer_id != me]
        if members and turn % REMIND_EVERY == 0:
            member = members[turn // REMIND_EVERY % len(members)]
            wish = self._membership.agreement.wants_view()  # while this peer is still a newcomer
            await self._while_agreed_on(view, self._ask_to_be_let_in(member, wish))

    async def _while_agreed_on(self, view: View, asking: Coroutine[Any, Any, bool]) -> None:
        """Stop waiting for `asking` where the view is given up. A dead member takes ten seconds not
        to answer. Others are then asked at once, and the status stops saying that layers are
        fetched."""
        task = asyncio.ensure_future(asking)
        try:
            while not task.done() and self._membership.agreement.next_view is view:
                await asyncio.wait({task}, timeout=TICK_S)
            if task.done():
                task.result()
        finally:
            task.cancel()

    def _possible_members(self) -> list[str]:
        """Peers that may be members, or not. Those heard last come first. Who is asked learns what
        this machine is, so in a run by invitation a bootstrap node is not."""
        membership, messenger = self._membership, self._network.messenger
        first = membership.asked_first
        known = {
            first,
            membership.acquaintances.welcomed_by,
            *messenger.known,
            *membership.agreement.known_peers,
        }
        known = set(filter(self._network.keeper.may_hear, known - {"", membership.me.peer_id}))
        heard_s = messenger.heard_s
        return sorted(known, key=lambda peer: (peer != first, -heard_s.get(peer, 0.0), peer))

    def _worth_asking(self, silent: set[str], turn: int) -> list[str]:
        """Peers to ask, without the `silent` ones. Those that were heard once and then fell silent
        take ten seconds not to answer. They are asked only where nobody else is left, or after many
        turns in vain. A peer not heard since this daemon began may be there."""
        heard_s, since_s = self._network.messenger.heard_s, now.monotonic_s() - GONE_AFTER_S
        members = [peer for peer in self._possible_members() if peer not in silent]
        there = [peer for peer in members if heard_s.get(peer, since_s) >= since_s]
        return there if there and turn < PATIENT_TURNS else members

    async def _find_others(self, pause_s: float) -> bool:
        """Look in all places again, since no known peer answers. Returns whether somebody was
        found. If not, a pause has passed."""
        agreement, acquaintances = self._membership.agreement, self._membership.acquaintances
        digest = self._membership.run.digest
        self._network.messenger.passed_over.clear()  # their reasons may have been for the moment
        await acquaintances.call_again()
        found = await acquaintances.look_for_members(digest)
        if found is not None:
            self._learn_of(found)
            return True
        if agreement.view is not None:  # let in meanwhile, by a member that was asked before
            return False
        may_go = self._membership.may_go_on_alone and self._has_waited(pause_s)
        if may_go and acquaintances.turned_away() is None:
            await self._go_on_alone()
            return False
        if not agreement.attempting and agreement.next_view is None:
            acquaintances.say_nobody_answers(digest, pause_s)
        end_s = now.monotonic_s() + pause_s
        while now.monotonic_s() < end_s and agreement.view is None and not agreement.attempting:
            await asyncio.sleep(TICK_S)
        if self._local.life.leaving.is_set():  # nobody is there to want what it has
            self._local.life.left.set()
        return False

    def _learn_of(self, found: Found) -> None:
        self._membership.acquaintances.welcomed_by = found.peer_id
        named = (peer.peer_id for peer in found.welcome.peers)
        self._membership.agreement.familiar.meet((found.peer_id, *named))
        self._network.messenger.learn_named(found.welcome.peers)

    def _has_waited(self, pause_s: float) -> bool:
        """Whether a peer that may found goes on alone now. One that was in a view waits longer for
        those that went on without it, but not for ever. All of them may have started again since,
        and ask to be let in themselves."""
        if not self._participant.views:
            return pause_s >= FOUNDS_AFTER_S
        if self._alone_since_s is None:
            self._alone_since_s = now.monotonic_s()
        return now.monotonic_s() - self._alone_since_s >= GOES_ALONE_AFTER_S

    async def _go_on_alone(self) -> None:
        """Go on alone. The members that were found, or that went on without this peer, have died
        before they let it in."""
        membership = self._membership
        agreement = membership.agreement
        if not membership.founds:  # else it has begun to found, and could not end that yet
            log.warning("goes on alone: nobody that was in a view of this run answers any more")
            membership.founds = True
            if not self._participant.trainer.states:  # else the states in memory are newer
                await self._participant.resume_from_checkpoint()
            self._local.life.spawn(membership.acquaintances.look_for_the_lost(agreement))
        if agreement.view is None and not agreement.attempting and agreement.next_view is None:
            membership.actions.do(agreement.found(now.monotonic_ns()))

    async def _ask_to_be_let_in(self, member: str, wish: JoinRequest) -> bool:
        """Ask one member; returns whether it can let this peer in. One that refuses counts as able
        to until `REFUSALS_LIMIT` refusals in a row: it may have started this very moment."""
        agreement = self._membership.agreement
        try:
            reply = await self._network.messenger.ask(member, wish)
            known = decode(reply, KnownPeers)
            self._learn_known(known)
            if agreement.familiar.holds(member):
                agreement.familiar.meet(peer.peer_id for peer in known.peers)
        except (Unreachable, PeerFault) as error:
            log.debug("not let in yet: %s", error)
            count = self._refusals.get(member, 0) + 1
            put_newest(self._refusals, member, count, PEERS_LIMIT)
            return isinstance(error, PeerFault) and count % REFUSALS_LIMIT != 0
        self._refusals.pop(member, None)
        self._hear_of_bar(member, known.barred)
        if known.lets_in and known.standing is None:
            self._complete = None
            self._ends.clear()
        if known.lets_in or known.standing is not None:
            self._as_new.pop(member, None)
        else:
            put_newest(self._as_new, member, None, PEERS_LIMIT)
        return known.lets_in and not self._is_at_end(member, known)

    def _hear_of_bar(self, member: str, barred: Barred | None) -> None:
        """Show what one member says of a bar. That is its word alone, and the others are asked as
        well, so it ends nothing."""
        status = self._local.status
        if barred is None:
            self._barred = ""
            status.troubles.over(BARRED)
            return
        steps = counted(max(0, barred.until_step - barred.step), "step")
        before = f"until step {barred.until_step}, {steps} from now"
        reason = "".join(filter(str.isprintable, barred.reason[:REASON_CHARACTERS]))
        what = f"this peer is barred {before}: {member} says that it {reason}"
        if not self._barred:
            log.warning("%s", what)
        self._barred = what
        status.say(State.JOINING, what)
        status.troubles.tell(BARRED, what, BARRED_FIX)

    def _is_at_end(self, member: str, known: KnownPeers) -> bool:
        """Whether the member says that no step of the run is left to join. The end counts as true
        if a peer that this one knows shows it.

        A member that says so without proof lets nobody in either. It may have joined after the last
        step committed, and have nothing that shows it.
        """
        if known.standing is None:
            return False
        run, familiar = self._membership.run, self._membership.agreement.familiar
        if familiar.holds(member) and shows_end(member, known.standing, run.spec):
            self._complete = RunComplete(run.digest[:16], run.spec.total_steps)
            put_newest(self._ends, member, None, PEERS_LIMIT)
        return True

    def _learn_known(self, known: KnownPeers) -> None:
        """Learn what the member that was asked says of others."""
        messenger = self._network.messenger
        messenger.learn_named(known.peers)
        self._membership.waiting_too = tuple(peer.peer_id for peer in known.waiting)
        for other in known.waiting:
            self._network.host.calling.seen_by_another(other.peer_id, other.seen_host)
            messenger.hear_of(other.peer_id, other.addresses)
