"""Coming to a run through peers that answer. One that lies or is of no use is left for the next
one."""

import asyncio
import contextlib
import itertools
import logging
import shlex
from collections.abc import Awaitable, Callable

from p2p_dtfm.core.membership.fellows import is_worth_a_return
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.dashboard.report_file import next_commands
from p2p_dtfm.daemon.machine.home import home_option, require_made
from p2p_dtfm.daemon.node.acquaintances import Acquaintances
from p2p_dtfm.daemon.node.join.own_disk import whole_step
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.node.network import Network
from p2p_dtfm.daemon.node.other_versions import how_apart
from p2p_dtfm.daemon.peers.discovery import find_run
from p2p_dtfm.daemon.peers.member_search import Found
from p2p_dtfm.daemon.peers.reachability import own_addresses
from p2p_dtfm.daemon.peers.run_source import (
    OtherProtocol,
    Run,
    RunComplete,
    fetch_run,
    is_here,
    open_local_run,
    require_joinable,
)
from p2p_dtfm.daemon.peers.wire import Welcome
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.net.contacts.addresses import parse_address, peer_ids_of
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.ports import now
from p2p_dtfm.train.data import BLOBS_NAME, BlobStore
from p2p_dtfm.train.model.gpt import layer_count

log = logging.getLogger("p2p_dtfm")

KNOCKED_LIMIT = 4
KNOCKING_S = 10.0
KNOCK_PAUSE_S = 1.0


class Leads:
    """Follows peers that say where the run is. One that could not be followed is passed over from
    then on."""

    def __init__(self, local: Local, network: Network, acquaintances: Acquaintances) -> None:
        self.goes_on_from_own = False
        """This peer has come further than the one that trains, which will come over."""
        self.complete_by = ""
        """The peer that last said that the run is complete."""
        self._local = local
        self._network = network
        self._acquaintances = acquaintances

    async def follow_first(self, look: Callable[[], Awaitable[Found | None]]) -> Run | None:
        """Join through the first peer that answers and can be followed; None where none is left.
        One that says that the run is complete, or that cannot give it, may lie: the next one is
        asked."""
        self.complete_by, complete = "", None
        while (found := await look()) is not None:
            try:
                return await self._join_found(found.peer_id, found.welcome)
            except UserError as error:
                log.warning("%s", error.cause)
                self._network.messenger.pass_over(found.peer_id, error)
                if isinstance(error, RunComplete):
                    is_known = self._acquaintances.is_known(found.peer_id)
                    complete = error if is_known else complete
                    self.complete_by = found.peer_id
        if complete is not None:
            raise self.with_own_model(complete)
        return None

    def with_own_model(self, complete: RunComplete) -> RunComplete:
        """`complete` with what to do where this home has the whole model: it was there at the end,
        and need ask nobody. Or it has one of before."""
        memory, home, settings = self._acquaintances.memory, self._local.home, self._local.settings
        if memory is None or not memory.run_digest.startswith(complete.run) or memory.spec.layers:
            return complete  # no command uses a model with listed layers
        generate, export = next_commands(home.root)
        if (step := whole_step(home, memory)) != complete.total_steps:
            older = (f"the model as it was after step {step} is here: {export}",) if step else ()
            return RunComplete(complete.run, complete.total_steps, (*complete.fixes, *older))
        spec = shlex.quote(settings.run) if settings.run else "FILE"
        founds = f"p2p-dtfm{home_option(home.root)} --run {spec} --new"
        fixes = (
            f"the whole model is here: {generate}",
            f"for other programs: {export}",
            f"to train anew from nothing: {founds}",
        )
        return RunComplete(complete.run, complete.total_steps, fixes)

    def require_nobody_known(self) -> None:
        """Refuse to found a run where known members are there: this peer would train apart from
        them. Raises `UserError`."""
        if (reason := self._acquaintances.turned_away()) is not None:
            is_unlike = isinstance(reason, OtherProtocol)
            fixes = reason.fixes if is_unlike else ("try again in a minute",)
            apart = "to train apart from them, from step 0: --new"
            if is_unlike and self._acquaintances.memory is not None:
                apart = f"to go on without them, {how_apart(self._local.settings)}"
            raise UserError(
                f"members of the run are there, but none can be joined: {reason.cause}",
                (*fixes, apart),
                exit_code=UNREACHABLE,
            )
        self._acquaintances.other_versions.say_apart(self._acquaintances.memory)

    async def ask_which_run(self, run_digest: str) -> Run:
        """Ask the initial peers which run they train, and whoever else is found. Raises
        `UserError`."""
        self._local.status.say(State.JOINING, "asks which run is trained here")
        initial = peer_ids_of(self._local.settings.initial_peers)
        own, error = await own_addresses(self._network.host), None
        while True:
            try:
                peer_id, welcome = await find_run(
                    self._network.messenger,
                    self._acquaintances.directory,
                    initial,
                    own,
                    run_digest,
                    lambda text: self._local.status.say(State.JOINING, text),
                    self._acquaintances.is_known,
                )
            except UserError as nobody:
                if isinstance(error, RunComplete):
                    error = self.with_own_model(error)
                raise (error or nobody) from nobody
            try:
                return await self._join_found(peer_id, welcome)
            except UserError as cause:
                log.warning("%s", cause.cause)
                self._network.messenger.pass_over(peer_id, cause)
                if not isinstance(error, RunComplete):  # which is shown, not only said
                    error = cause

    async def _join_found(self, peer_id: str, welcome: Welcome) -> Run:
        """Learn the run and its members from a peer that has answered. Raises `UserError` where the
        peer cannot be followed."""
        spec = RunSpec.from_canonical_bytes(welcome.run_spec.payload)
        await require_joinable(self._network.messenger, peer_id, welcome, spec)
        run = await asyncio.to_thread(self._from_own_disk, peer_id, welcome, spec)
        if run is not None:
            return run
        self._acquaintances.welcomed_by = peer_id
        self._local.observer.seen.names.hear(peer_id, welcome.name)
        self._local.observer.came_to(welcome.tokens_per_s, welcome.members, welcome.step)
        members = {peer_id, *(peer.peer_id for peer in welcome.peers)}
        for address in self._network.first_contacts:
            if (contact := parse_address(address)[0]) not in members:
                self._network.messenger.forget(contact)  # it is a bootstrap node
        self._network.messenger.learn_named(welcome.peers)
        self._acquaintances.members_named = tuple(sorted(members))
        spec_digest = digest_bytes(welcome.run_spec.payload)
        store = self._store(spec_digest)
        peers = list(dict.fromkeys([peer_id, *self._network.messenger.known]))
        self._network.messenger.run_digest = spec_digest
        run = await self._fetch_run(welcome, store, peers)
        await self._acquaintances.directory.meet(sorted({peer_id} - {self._network.me.peer_id}))
        log.info("%s", run.manifest.describe())
        log.info("takes part in run %s (%s)", run.digest[:16], run.spec.name)
        if spec.privacy.withheld(self._network.me.peer_id, layer_count(spec)):
            log.info(
                "its data, embedding and head are left to %s: this peer trains what lies between",
                counted(len(spec.privacy.ends), "member"),
            )
        return run

    def _store(self, run_digest: str) -> BlobStore:
        """Where the run's files lie. Raises `UserError` if the home was moved away while this peer
        looked for members, perhaps for days: half a home would be made in its place."""
        require_made(self._local.home.root, was_held=True)
        return BlobStore(self._local.home.run_directory(run_digest) / BLOBS_NAME)

    def _from_own_disk(self, peer_id: str, welcome: Welcome, spec: RunSpec) -> Run | None:
        """The run from this peer's own disk, if a peer that was met before went on alone from much
        older states than are here. That peer then comes over to where more is trained, and nothing
        is computed again."""
        recalled, run_digest = self._acquaintances.memory, digest_bytes(welcome.run_spec.payload)
        if recalled is None or recalled.run_digest != run_digest:
            return None
        store = self._store(run_digest)
        own = whole_step(self._local.home, recalled)
        is_met = peer_id in {item.peer_id for item in recalled.members}
        every_steps = spec.checkpoint.every_steps
        further = is_worth_a_return(own, welcome.step, welcome.members, every_steps)
        if not (is_met and further and is_here(recalled.signed_spec, store)):
            return None
        log.warning(
            "%s trains alone, at step %d; here is a whole checkpoint of step %d: goes on from that",
            peer_id,
            welcome.step,
            own,
        )
        self.goes_on_from_own = True
        return open_local_run(recalled.signed_spec, store)

    async def _fetch_run(self, welcome: Welcome, store: BlobStore, peers: list[str]) -> Run:
        """Knock and fetch the run: only peers that knock are given the manifest. Where many knock
        at once, this peer tries again for a while, and at other peers' doors."""
        turns = itertools.cycle(
            peers[first : first + KNOCKED_LIMIT] for first in range(0, len(peers), KNOCKED_LIMIT)
        )
        end_s = now.monotonic_s() + KNOCKING_S
        while True:
            asked = next(turns)
            for peer_id in asked:
                with contextlib.suppress(Unreachable):
                    await self._network.messenger.knock(peer_id)
            try:
                return await fetch_run(welcome, store, self._network.blobs, asked)
            except UserError:
                if now.monotonic_s() > end_s:
                    raise
            self._network.messenger.forget_knocks()
            await asyncio.sleep(KNOCK_PAUSE_S)
