"""The peers that this home has met in a run, kept on disk; and how a daemon finds them when it
comes back."""

import asyncio
import logging
from functools import partial

import msgspec

from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.membership.fellows import is_worth_a_return
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.node.network import CALL_LIMIT_S, CALLED_LIMIT, Network
from p2p_dtfm.daemon.node.other_versions import OtherVersions, how_alone, how_apart
from p2p_dtfm.daemon.peers.home_memory import (
    MEETING_POINTS_LIMIT,
    Acquaintance,
    Memory,
    acquaintance,
    this_machine,
    write_memory,
)
from p2p_dtfm.daemon.peers.member_search import Found, MemberSearch, Sought
from p2p_dtfm.daemon.peers.reachability import own_addresses
from p2p_dtfm.daemon.peers.recall import Past
from p2p_dtfm.daemon.peers.run_source import OtherProtocol, Run
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.net.contacts.addresses import by_peer, parse_address, peer_ids_of
from p2p_dtfm.net.contacts.first_contacts import reach_any
from p2p_dtfm.net.contacts.nearby import Nearby, Neighbour
from p2p_dtfm.net.contacts.ports import port_listened_at
from p2p_dtfm.net.directory.port import DirectoryPort
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.ports import now

LOOKS_FOR_WHO_STARTS = 4
SHOWS_END = "shows that it is complete"
LOOK_AGAIN_S = 4.0
LOOK_AGAIN_LIMIT_S = 16.0
REMEMBER_EVERY_S = 60.0
REUNION_S = 10.0
REUNION_LIMIT_S = 30.0
NOBODY_ANSWERS = "members"

log = logging.getLogger("p2p_dtfm")


class Acquaintances:
    """`memory` is what this home remembers of the run that the daemon comes back to, if it does.
    Later it is what is written of the run that the daemon takes part in."""

    def __init__(
        self, local: Local, network: Network, past: Past, directory: DirectoryPort
    ) -> None:
        self.runs = past.runs
        self.memory = past.recalled
        self.directory = directory
        self.welcomed_by = ""
        """The member that answered first."""
        self.members_named: tuple[str, ...] = ()
        """Peers that the welcoming member has named, and that member."""
        self.comes_back = False
        """This home was in the run before."""
        self._local = local
        self._network = network
        self._nearby: Nearby | None = None
        if local.settings.nearby:
            self._nearby = Nearby(network.me.peer_id, network.host.is_only_local)
        self._search = MemberSearch(
            network.messenger, directory, self._nearby, network.host.addresses
        )
        self._memory_lock = asyncio.Lock()
        self._memory_fails = False
        self.other_versions = OtherVersions(local, network, self.is_known)

    @classmethod
    async def start(cls, local: Local, network: Network, past: Past) -> "Acquaintances":
        """Start the directory through the peers that were reached. Raises `UserError` if the
        initial peers do not do. Peers that are only remembered may be nodes of the directory or
        not."""
        host, serves = network.host, not network.reachability.is_behind_router
        world = local.world
        for peer_id, ways in by_peer(network.first_contacts).items():
            network.messenger.learn(peer_id, ways)
        if meeting_points(local.settings, network):
            try:
                directory = await world.start_directory(host, network.first_contacts, serves)
            except UserError as error:
                raise await network.why_turned_away(error) from error
        else:
            directory = await world.start_directory(host, (), serves)
            await directory.meet(peer_ids_of(network.first_contacts))
        found = cls(local, network, past, directory)
        found.seal_directory()
        return found

    def seal_directory(self) -> None:
        """In a run by invitation, seal the directory: only members then find one another there."""
        own = self._network.invitation
        if own is not None:
            self.directory.seal(own.run_digest, own.directory_key)

    async def close(self) -> None:
        self.be_silent()
        await self.directory.close()

    def be_silent(self) -> None:
        """Answer nobody on the local network any more."""
        if self._nearby is not None:
            self._nearby.close()

    # ---- looking

    def _sought(self, run_digest: str) -> Sought:
        """Where to look: the initial peers, which may be members too, and those that are
        remembered."""
        met, memory = by_peer(self._local.settings.initial_peers), self.memory
        if memory is not None and memory.run_digest == run_digest:
            for item in memory.members:
                met[item.peer_id] = (*met.get(item.peer_id, ()), *item.addresses)
        first = peer_ids_of(self._network.first_contacts)
        return Sought(run_digest, tuple(met.items()), tuple(first))

    async def look_for_members(self, run_digest: str) -> Found | None:
        """Look in all places, for a bounded time. The log says where, and what came of it."""
        sought = self._sought(run_digest)
        places = self._search.places(sought)
        what = f"looks for members of run {run_digest[:16]}: asks {places}"
        if self._local.status.state is State.JOINING:
            log.info("%s", what)
        self._local.status.say(State.JOINING, what)
        found = await self._search.look(sought)
        if found is None:
            nobody = "no other member" if self._network.messenger.passed_over else "no member"
            log.info("%s of run %s answers: asked %s", nobody, run_digest[:16], places)
            self._say_who_trains_another()
        else:
            self._local.status.troubles.over(NOBODY_ANSWERS)
            log.info(
                "found %s, a member of run %s, %s", found.peer_id, run_digest[:16], found.where
            )
        self.other_versions.say()
        return found

    async def find_view(self, run: Run, own_step: int) -> Found:
        """Look until a member with a view answers, while this peer waits for those that it would
        begin with. A member that went on alone from much older states than are here does not
        count."""
        pause_s, every_steps = LOOK_AGAIN_S, run.spec.checkpoint.every_steps
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_AGAIN_LIMIT_S)
            await self.call_again()
            found = await self._search.look(self._sought(run.digest))
            if found is None or not (members := found.welcome.members):
                continue
            if not is_worth_a_return(own_step, found.welcome.step, members, every_steps):
                return found

    def _say_who_trains_another(self) -> None:
        """Log who trains another run. A user that names a run spec and a member may well mean the
        run of that member."""
        given = set(peer_ids_of(self._local.settings.initial_peers))
        for peer_id, what in self._search.elsewhere.items():
            means_it = self._local.settings.run and peer_id in given
            log.warning("%s%s", what, "; without --run this joins that one" if means_it else "")

    def is_known(self, peer_id: str) -> bool:
        """Whether the user has named it, or it was met in this run."""
        return peer_id in peer_ids_of(self._local.settings.initial_peers) or self._has_met(peer_id)

    def turned_away(self) -> UserError | None:
        """Why a known peer that answers could not be followed; None if none was. Peers of another
        version count only where they keep this peer from going on. Where they are few,
        `other_versions` tells of them."""
        passed_over = self._network.messenger.passed_over
        if (unlike := self.other_versions.held_back_by(self.memory)) is not None:
            return unlike
        known = (why for peer, why in passed_over.items() if self.is_known(peer))
        return next((why for why in known if not isinstance(why, OtherProtocol)), None)

    def say_nobody_answers(
        self,
        run_digest: str,
        pause_s: float,
        complete_by: str = "",
        could_go_on: bool = False,
        could_go_apart: bool = False,
    ) -> None:
        """Say that the daemon goes on looking by itself, and that somebody may have to start one of
        the others.

        `complete_by`: a peer never met here that shows that the run is complete, for which keys can
        be made. `could_go_on`: from its own disk, had it not been told of peers. `could_go_apart`:
        though members of another version are there.
        """
        what = f"no member of run {run_digest[:16]} answers"
        is_invited = self.memory is not None and self.memory.spec.admission.is_invited
        option = "--invite" if is_invited else "--initial-peers"
        its_own = "a line that it prints" if is_invited else "its address"
        fix = (
            "start one of them; or, if one runs elsewhere, start this one again with "
            f"{option} and {its_own}"
        )
        if could_go_on:
            alone = how_alone(self._local.settings, option)
            fix = (
                f"start one of them; or, if all wait as this one does, {alone}: "
                "it goes on from its own disk, and they find it"
            )
        if complete_by:
            what += f" that was met here; {complete_by}, which was not, {SHOWS_END}"
            fix = f"if you know that peer, start this one again with {option} and {its_own}"
        if (unlike := next(iter(self.other_versions.known().values()), None)) is not None:
            what = f"no member of run {run_digest[:16]} of this version answers; {unlike.cause}"
            fix = f"{unlike.fixes[0]}; or {fix}"
        if (unlike := self.other_versions.held_back_by(self.memory)) is not None:
            fix = f"{unlike.fixes[0]}; this daemon goes on looking meanwhile"
            if could_go_apart:
                fix += f"; to go on without them, {how_apart(self._local.settings)}"
        self._local.status.say(State.WAITING, f"{what}; looks again in {pause_s:.0f} s")
        self._local.status.troubles.tell(NOBODY_ANSWERS, what, fix)

    async def look_before_going_alone(self, run_digest: str) -> Found | None:
        """Look for members, and let another starting peer go first. Where all start at once, as
        after a power cut, the others find that one. Otherwise they would begin swarms that have to
        be given up. Peers that met before find one another nearby, even if all have new ports."""
        await self._answer_nearby(run_digest, only_known=True)
        for _ in range(LOOKS_FOR_WHO_STARTS):
            found = await self.look_for_members(run_digest)
            if found is not None or not await self._goes_another_first():
                return found
            await asyncio.sleep(1.0)
        return None

    async def _goes_another_first(self) -> bool:
        """Whether a peer that was met before is connected and goes first, being without a run as
        well."""
        there = await self._connected()
        met = {item.peer_id for item in self.memory.members} if self.memory else set()
        return any(peer_id < self._network.me.peer_id for peer_id in there & met)

    async def _connected(self) -> set[str]:
        try:
            return set(await self._network.host.connected_peers())
        except Unreachable as error:
            log.debug("%s", error)
            return set()

    async def call_again(self) -> None:
        """Call the peers that were out of reach a while ago. The directory is read through one of
        them."""
        remembered = self.memory.addresses() if self.memory is not None else ()
        addresses = tuple(dict.fromkeys((*self._local.settings.initial_peers, *remembered)))
        reached = await reach_any(self._network.host, addresses[:CALLED_LIMIT], CALL_LIMIT_S)
        await self.directory.meet(peer_ids_of(reached))

    # ---- remembering

    async def begin_to_remember(self, run: Run) -> None:
        """Remember the run in this home from now on, even if nobody is met in it."""
        recalled = next((item for item in self.runs if item.run_digest == run.digest), None)
        machine = this_machine()
        if recalled is not None and recalled.machine != machine:
            self._say_that_it_was_moved(recalled)
        self.comes_back = self.memory is not None
        memory = recalled or Memory(run.signed_spec, 0, machine)
        here = meeting_points(self._local.settings, self._network)
        points = dict.fromkeys((*here, *memory.meeting_points))
        self.memory = msgspec.structs.replace(
            memory, machine=machine, meeting_points=tuple(points)[:MEETING_POINTS_LIMIT]
        )
        # others look later at a node that is away now, as after a power cut
        where = dict.fromkeys((*self._local.settings.initial_peers, *self.memory.meeting_points))
        self.directory.call_again_at([*where][:CALLED_LIMIT])
        await self.remember(None)
        await self._answer_nearby(run.digest, only_known=False)

    def _say_that_it_was_moved(self, last: Memory) -> None:
        spec, me, identity = last.spec, self._network.me.peer_id, self._local.home.identity
        fix = f"to be another peer, end this one and remove {identity}"
        if me in (last.signed_spec.peer_id, spec.admission.founder, *spec.privacy.ends):
            fix = (
                f"end one of the two, and keep {identity}: this peer's rights in the run rest on it"
            )
        log.warning(
            "this home was last used on another machine: if it still runs there, two daemons "
            "speak as one peer; %s",
            fix,
        )

    async def _answer_nearby(self, run_digest: str, *, only_known: bool) -> None:
        """Answer peers on the local network that ask for members of this run: tell them where this
        peer is."""
        if self._nearby is None:
            return
        settings = self._local.settings
        own = await own_addresses(self._network.host)
        if port := port_listened_at(settings.listen, settings.announce, own):
            await self._nearby.answer(run_digest, port, self._has_met, only_known=only_known)

    def tell_whom_it_follows(self, agreement: Agreement, run_digest: str) -> None:
        """Tell the agreement which peers this one follows: those that the user named, those that
        were met, and those that such peers have named. A swarm of keys that somebody made up has
        none of them."""
        addresses, memory = self._local.settings.initial_peers, self.memory
        agreement.familiar.give(peer_ids_of(addresses))
        if memory is not None and memory.run_digest == run_digest:
            agreement.familiar.meet(item.peer_id for item in memory.members)
        agreement.familiar.meet(self.members_named)

    def _has_met(self, peer_id: str) -> bool:
        return self.memory is not None and any(
            item.peer_id == peer_id for item in self.memory.members
        )

    def _seen_members(self, view: View | None) -> list[Acquaintance]:
        """Members of the view in force; before there is a view, those that a member named."""
        now_s, where = int(now.wall_s()), self._network.messenger.where
        if view is None:
            named = {peer: where(peer) for peer in self.members_named}
        else:  # a member may have said since that it is elsewhere
            records = view.snapshot.records
            named = {it.peer_id: (*where(it.peer_id), *it.addresses) for it in records}
        return [
            acquaintance(peer_id, addresses, now_s)
            for peer_id, addresses in named.items()
            if peer_id != self._network.me.peer_id and addresses
        ]

    async def remember(self, view: View | None) -> None:
        """Write down the peers that were met. A full disk costs the memory, which is told once, and
        nothing else."""
        if self.memory is None:
            return
        seen, used_s = self._seen_members(view), self._used_s(self.memory)
        self.memory = msgspec.structs.replace(
            self.memory.met(seen), used_s=used_s, written=self.memory.written + 1
        )
        async with self._memory_lock:
            try:
                directory = self._local.home.run_directory(self.memory.run_digest)
                await asyncio.to_thread(write_memory, directory, self.memory)
                self._memory_fails = False
            except OSError as error:
                if not self._memory_fails:
                    log.warning("cannot write down whom it met: %s", error)
                self._memory_fails = True

    def _used_s(self, memory: Memory) -> int:
        """A time later than that of all other runs, so that the run used last is the one to take
        up. The others may be from a time when the clock was ahead."""
        others_s = (it.used_s for it in self.runs if it.run_digest != memory.run_digest)
        return max(int(now.wall_s()), max(others_s, default=0) + 1)

    async def keep_remembering(self, agreement: Agreement) -> None:
        """Remember the view's members now and then, for ever."""
        while True:
            await asyncio.sleep(REMEMBER_EVERY_S)
            await self.remember(agreement.view)

    # ---- coming together

    async def look_for_the_lost(self, agreement: Agreement) -> None:
        """Go on looking for peers that were met before, and tell them where this peer stands. A
        peer that came back to nobody does so. Two swarms of one run then become one, whichever
        began first."""
        memory, pause_s = self.memory, REUNION_S
        known_before = memory.members[:CALLED_LIMIT] if memory is not None else ()
        names = {item.peer_id for item in known_before}
        if memory is None or not names:
            return
        messenger = self._network.messenger
        while True:
            view = agreement.view
            absent = names - set(view.member_ids) if view is not None else set()
            for item in known_before:
                if item.peer_id in absent:
                    if item.peer_id not in messenger.known:
                        messenger.learn(item.peer_id, item.addresses)
                    agreement.know(item.peer_id)
            await self.directory.meet(sorted(absent & await self._connected()))
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, REUNION_LIMIT_S)

    async def ask_nearby_for_the_lost(self, agreement: Agreement) -> None:
        """Ask the local network for lost peers, for ever. Every member does so. Where all peers of
        a network get new addresses at once, none finds another at the address that it knows."""
        nearby, pause_s = self._nearby, REUNION_S
        on_neighbour = partial(self._on_neighbour, agreement)
        while nearby is not None:
            lost = self._lost(agreement)
            if self.memory is not None and lost:
                await nearby.ask(self.memory.run_digest, on_neighbour)
                await self.directory.meet(sorted(lost & await self._connected()))
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, REUNION_LIMIT_S)

    def _lost(self, agreement: Agreement) -> set[str]:
        """Peers that were met, and are now in another view than this peer, or held for lost."""
        if self.memory is None or agreement.view is None:
            return set()  # a peer in no view looks for all of them
        return {item.peer_id for item in self.memory.members} - _present(agreement)

    def _on_neighbour(self, agreement: Agreement, found: Neighbour) -> None:
        at, messenger = f"{found.address}/p2p/{found.peer_id}", self._network.messenger
        if found.peer_id in _present(agreement):
            return
        if self._has_met(found.peer_id):  # it may be again where it was before
            ways = (at, *messenger.where(found.peer_id))
            messenger.learn(found.peer_id, tuple(dict.fromkeys(ways)))
        elif found.knows_asker:  # as the neighbour itself says
            messenger.hear_of(found.peer_id, (at,))
        else:
            return
        agreement.know(found.peer_id)

    def look_around(self) -> None:
        """Listen for questions on the new network too, because this machine has come to another
        one."""
        if self._nearby is not None:
            self._nearby.look_around()


def _present(agreement: Agreement) -> set[str]:
    """Members of this peer's view that are not held for lost."""
    members = () if agreement.view is None else agreement.view.member_ids
    return set(members).difference(agreement.suspected)


def meeting_points(settings: Settings, network: Network) -> tuple[str, ...]:
    """The initial peers that were reached. A bootstrap node may be among them."""
    given = set(peer_ids_of(settings.initial_peers))
    return tuple(at for at in network.first_contacts if parse_address(at)[0] in given)
