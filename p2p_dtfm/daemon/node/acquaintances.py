"""Whom this home has met in a run, kept on disk; and how a daemon finds them when it comes back."""

import asyncio
import logging
import time
from collections.abc import Iterable

import msgspec

from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.node.peer_state import PeerState
from p2p_dtfm.daemon.node.recall import recall
from p2p_dtfm.daemon.peers.home_memory import (
    MEETING_POINTS_LIMIT,
    Acquaintance,
    Memory,
    acquaintance,
    this_machine,
    write_memory,
)
from p2p_dtfm.daemon.peers.member_search import Found, Search, Sought
from p2p_dtfm.daemon.peers.run_source import Run
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.net.contacts.addresses import host_and_port, is_relayed, parse_address
from p2p_dtfm.net.contacts.first_contacts import (
    FIRST_CONNECT_DEADLINE_S,
    reach_any,
    reach_first_peers,
)
from p2p_dtfm.net.contacts.nearby import Nearby, Neighbour
from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.train.model.checkpoint import list_checkpoints, load_layer
from p2p_dtfm.train.model.gpt import layer_count

CALL_LIMIT_S = 3.0
CALLED_LIMIT = 16
LOOKS_FOR_WHO_STARTS = 4
LOOK_AGAIN_S = 4.0
LOOK_AGAIN_LIMIT_S = 16.0
REMEMBER_EVERY_S = 60.0
REUNION_S = 10.0
REUNION_LIMIT_S = 30.0
NOBODY_ANSWERS = "members"
UNREACHABLE = 6

log = logging.getLogger("p2p_dtfm")


class Acquaintances(PeerState):
    """`_recalled` is what this home remembers of the run that it comes back to, if it does;
    `_memory` what is written of the run that it takes part in."""

    async def _recall(self) -> None:
        """Read what this home remembers. Raises `UserError` if nothing says what to do."""
        self._past, self._recalled = await asyncio.to_thread(recall, self.settings)

    async def _reach_first_contacts(self) -> tuple[str, ...]:
        """Call the initial peers; those that are remembered where there are none, or none answers.
        The addresses that were reached. Raises `UserError` where nobody is remembered either."""
        initial, recalled = self.settings.initial_peers, self._recalled
        if initial:
            patience_s = FIRST_CONNECT_DEADLINE_S if recalled is None else CALL_LIMIT_S
            try:
                return await reach_first_peers(self._host, initial, patience_s)
            except UserError as error:
                if recalled is None or error.exit_code != UNREACHABLE:
                    raise
                log.warning("%s", error.cause)
        if recalled is None or not (addresses := recalled.addresses()[:CALLED_LIMIT]):
            return ()
        self.status.say(State.STARTING, f"calls {len(addresses)} peers that it met before")
        return await reach_any(self._host, addresses, CALL_LIMIT_S)

    async def _start_directory(self, serves: bool) -> Directory:
        """Through those that were reached. Raises `UserError` if the initial peers do not do; those
        that are only remembered may be nodes of it or not."""
        if self._meeting_points():
            return await Directory.start(self._host, self._first_contacts, serves)
        directory = await Directory.start(self._host, (), serves)
        await directory.meet([parse_address(address)[0] for address in self._first_contacts])
        return directory

    def _begin_to_search(self) -> None:
        if self.settings.nearby:
            self._nearby = Nearby(self._me.peer_id, self._host.is_only_local)
        self._search = Search(self._messenger, self._directory, self._nearby, self._host.addresses)

    def _sought(self, run_digest: str) -> Sought:
        """The initial peers, which may have run and members alike, and who is remembered."""
        met: dict[str, tuple[str, ...]] = {}
        for address in self.settings.initial_peers:
            met[parse_address(address)[0]] = (address,)
        memory = self._memory or self._recalled
        if memory is not None and memory.run_digest == run_digest:
            for item in memory.members:
                met[item.peer_id] = (*met.get(item.peer_id, ()), *item.addresses)
        first = tuple(parse_address(address)[0] for address in self._first_contacts)
        return Sought(run_digest, tuple(met.items()), first)

    async def _look_for_members(self, run_digest: str) -> Found | None:
        """In all places, for a bounded time; says where, and what came of it."""
        sought = self._sought(run_digest)
        places = self._search.places(sought)
        what = f"looks for members of run {run_digest[:16]}: asks {places}"
        if self.status.state is State.JOINING:
            log.info("%s", what)
        self.status.say(State.JOINING, what)
        found = await self._search.look(sought)
        if found is None:
            log.info("no member of run %s answers: asked %s", run_digest[:16], places)
        else:
            self.status.troubles.over(NOBODY_ANSWERS)
            log.info(
                "found %s, a member of run %s, %s", found.peer_id, run_digest[:16], found.where
            )
        return found

    def _say_nobody_answers(self, run_digest: str, pause_s: float) -> None:
        """It goes on looking by itself; somebody may have to start one of the others."""
        what = f"no member of run {run_digest[:16]} answers"
        self.status.say(State.WAITING, f"{what}; looks again in {pause_s:.0f} s")
        self.status.troubles.tell(
            NOBODY_ANSWERS,
            what,
            "start one of them; or, if one runs elsewhere, start this one again with "
            "--initial-peers and its address",
        )

    async def _look_before_going_alone(self, run_digest: str) -> Found | None:
        """Where others start at the same moment, as after a power cut, one goes first: the others
        find it instead of beginning swarms of their own that would have to be given up."""
        for _ in range(LOOKS_FOR_WHO_STARTS):
            found = await self._look_for_members(run_digest)
            if found is not None or not await self._goes_another_first():
                return found
            await asyncio.sleep(1.0)
        return None

    async def _goes_another_first(self) -> bool:
        """Whether one that was met before is there, though without a run yet, and goes first."""
        there = await self._connected()
        met = {item.peer_id for item in self._recalled.members} if self._recalled else set()
        return any(peer_id < self._me.peer_id for peer_id in there & met)

    async def _connected(self) -> set[str]:
        try:
            return set(await self._host.connected_peers())
        except Unreachable as error:
            log.debug("%s", error)
            return set()

    async def _call_again(self, memory: Memory | None) -> None:
        """Those that were out of reach a while ago: through one of them the directory is read."""
        remembered = memory.addresses() if memory is not None else ()
        addresses = tuple(dict.fromkeys((*self.settings.initial_peers, *remembered)))
        reached = await reach_any(self._host, addresses[:CALLED_LIMIT], CALL_LIMIT_S)
        await self._directory.meet([parse_address(address)[0] for address in reached])

    # ---- remembering

    async def _begin_to_remember(self, run: Run) -> None:
        """From now on this home knows the run, even if nobody is met in it."""
        recalled = next((item for item in self._past if item.run_digest == run.digest), None)
        machine = this_machine()
        if recalled is not None and recalled.machine != machine:
            log.warning(
                "this home was last used on another machine: if it still runs there, two daemons "
                "speak as one peer; to be another peer, end this one and remove %s",
                self.home.identity,
            )
        memory = recalled or Memory(run.signed_spec, 0, machine)
        points = dict.fromkeys((*self._meeting_points(), *memory.meeting_points))
        self._memory = msgspec.structs.replace(
            memory, machine=machine, meeting_points=tuple(points)[:MEETING_POINTS_LIMIT]
        )
        await self._remember(self._seen_members())
        if self._nearby is not None:
            port = next(
                (
                    host_and_port(address)[1]
                    for address in await self._host.addresses()
                    if not is_relayed(address)
                ),
                0,
            )
            if port:
                await self._nearby.answer(run.digest, port, self._has_met)

    def _meeting_points(self) -> tuple[str, ...]:
        """Of the initial peers, those that were reached: a bootstrap node may be among them."""
        given = {parse_address(address)[0] for address in self.settings.initial_peers}
        return tuple(at for at in self._first_contacts if parse_address(at)[0] in given)

    def _tell_whom_it_follows(self, agreement: Agreement) -> None:
        """Those that the user named, and those that were met, or that such have named: a swarm of
        keys that somebody has made has none of them."""
        addresses = self.settings.initial_peers
        agreement.familiar.give(parse_address(address)[0] for address in addresses)
        recalled, digest = self._recalled, self._run.digest if self._run is not None else ""
        if recalled is not None and recalled.run_digest == digest:
            agreement.familiar.meet(item.peer_id for item in recalled.members)
        agreement.familiar.meet(self._members_named)

    def _has_met(self, peer_id: str) -> bool:
        return self._memory is not None and any(
            item.peer_id == peer_id for item in self._memory.members
        )

    def _seen_members(self) -> list[Acquaintance]:
        """Those of the view in force; before there is one, those that a member named."""
        now_s = int(time.time())
        view = self._agreement.view if self._agreement is not None else None
        if view is None:
            named = {peer: self._messenger.where(peer) for peer in self._members_named}
        else:
            named = {record.peer_id: record.addresses for record in view.snapshot.records}
        return [
            acquaintance(peer_id, addresses, now_s)
            for peer_id, addresses in named.items()
            if peer_id != self._me.peer_id and addresses
        ]

    def _remember_members(self) -> None:
        """A view has been taken over: others are there."""
        if self._memory is not None:
            self._spawn(self._remember(self._seen_members()))

    async def _remember(self, seen: Iterable[Acquaintance]) -> None:
        """Write it down. A full disk costs the memory, told once, and nothing else."""
        assert self._memory is not None
        used_s = int(time.time())
        self._memory = msgspec.structs.replace(self._memory.met(seen), used_s=used_s)
        async with self._memory_lock:
            try:
                directory = self.home.run_directory(self._memory.run_digest)
                await asyncio.to_thread(write_memory, directory, self._memory)
                self._memory_fails = False
            except OSError as error:
                if not self._memory_fails:
                    log.warning("cannot write down whom it met: %s", error)
                self._memory_fails = True

    async def _memory_loop(self) -> None:
        while True:
            await asyncio.sleep(REMEMBER_EVERY_S)
            await self._remember(self._seen_members())

    # ---- coming together

    async def _resume_from_checkpoint(self) -> None:
        """A founder that finds whole checkpoints of its run goes on from the newest."""
        assert self._run is not None and self._trainer is not None and self._agreement is not None
        assert self._checkpoints is not None
        if not self._founds:
            return
        for checkpoint in list_checkpoints(self.home.checkpoints(self._run.digest)):
            if len(checkpoint.layers) < layer_count(self._run.spec):
                continue
            step = checkpoint.manifest.step
            states = {}
            for layer in checkpoint.layers:
                states[layer] = await self.compute.run(load_layer, checkpoint.directory, layer)
            if self._agreement.view is not None or self._agreement.next_view is not None:
                return  # let in meanwhile: its states are those of the others
            self._trainer.adopt(states, step)
            held = dict.fromkeys(states, step)
            lineage = checkpoint.manifest.lineage
            self._agreement.resume(step, held, lineage, self._checkpoints.saved)
            log.info("goes on from the checkpoint of step %d", step)
            return

    async def _reunion_loop(self) -> None:
        """Who came back to nobody goes on looking for those that it had met, and tells them where
        it stands: two swarms of one run become one, whichever began first."""
        assert self._agreement is not None and self._memory is not None
        agreement, pause_s = self._agreement, REUNION_S
        known_before = self._memory.members[:CALLED_LIMIT]
        names = {item.peer_id for item in known_before}
        if not names:
            return

        def on_neighbour(found: Neighbour) -> None:
            at = (f"{found.address}/p2p/{found.peer_id}",)
            if found.peer_id in names:
                self._messenger.learn(found.peer_id, at)
            elif found.knows_asker:  # so it says
                self._messenger.hear_of(found.peer_id, at)
            else:
                return
            agreement.know(found.peer_id)

        while True:
            view = agreement.view
            absent = names - set(view.member_ids) if view is not None else set()
            for item in known_before:
                if item.peer_id in absent:
                    if item.peer_id not in self._messenger.known:
                        self._messenger.learn(item.peer_id, item.addresses)
                    agreement.know(item.peer_id)
            if absent and self._nearby is not None:
                await self._nearby.ask(self._memory.run_digest, on_neighbour)
            await self._directory.meet(sorted(absent & await self._connected()))
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, REUNION_LIMIT_S)
