"""How a daemon comes to a run: it founds one, or learns of one from those who train it."""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from p2p_dtfm.core.membership.fellows import is_worth_a_return
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.run_spec import AdmissionSpec, RunSpec
from p2p_dtfm.daemon.machine.resident_limit import within_resident_limit
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.machine.view_history import ViewHistory
from p2p_dtfm.daemon.node.acquaintances import (
    LOOK_AGAIN_LIMIT_S,
    LOOK_AGAIN_S,
    Acquaintances,
    meeting_points,
)
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.node.network import Network
from p2p_dtfm.daemon.peers.discovery import find_run
from p2p_dtfm.daemon.peers.home_memory import Memory
from p2p_dtfm.daemon.peers.member_search import Found
from p2p_dtfm.daemon.peers.run_source import (
    Run,
    RunComplete,
    fetch_run,
    is_here,
    open_local_run,
    prepare_run,
    require_joinable,
    sign_spec,
)
from p2p_dtfm.daemon.peers.self_record import SelfRecord
from p2p_dtfm.daemon.peers.wire import Welcome
from p2p_dtfm.daemon.state_transfer.initial_states import store_initial
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.net.contacts.addresses import parse_address, peer_ids_of
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.ports import now
from p2p_dtfm.sim.scenario.files import find_run_spec
from p2p_dtfm.train.data import BLOBS_NAME, BlobStore, Progress
from p2p_dtfm.train.model.checkpoint import list_checkpoints
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.stage.measure import (
    LIBRARIES_BYTES,
    TorchDevice,
    cap_device_memory,
    select_device,
)
from p2p_dtfm.train.stage.replay.arithmetic import threads_believed

log = logging.getLogger("p2p_dtfm")

KNOCKED_LIMIT = 4
KNOCKING_S = 10.0
KNOCK_PAUSE_S = 1.0


class RunJoining:
    """Founding and joining. `founds`: nobody else is there, so this peer makes the first view;
    `may_go_on_alone`: it may do so later, if those that it has found die."""

    def __init__(self, local: Local, network: Network, acquaintances: Acquaintances) -> None:
        self.founds = self.may_go_on_alone = local.settings.founds
        self.goes_on_from_own = False
        """It has come further than the one that trains, who will come over."""
        self.has_lost_memory = False
        """It founds a run in which it was before, and remembers nobody: members may find it yet."""
        self._complete_by = ""
        self._local = local
        self._network = network
        self._acquaintances = acquaintances

    async def enter_run(self) -> Run:
        """Found it, join it, or take up the last one."""
        settings, recalled = self._local.settings, self._acquaintances.memory
        if settings.run:
            return await self._found_run()
        if recalled is None:
            return await self._join_run(settings.run_digest)
        if settings.initial_peers and meeting_points(settings, self._network):
            try:
                return await self._join_run(settings.run_digest)
            except UserError as error:
                if error.exit_code != UNREACHABLE:
                    raise
                log.warning("%s", error.cause)
        return await self._take_up(recalled)

    async def _found_run(self) -> Run:
        self._local.status.say(State.STARTING, "prepares the data of the run")
        path = find_run_spec(self._local.settings.run)
        scratch = self._local.home.root / "prepared"
        spec, prepared = await asyncio.to_thread(
            prepare_run, path, scratch, self._progress_of_data()
        )
        me = self._network.me.peer_id
        spec = spec.model_copy(update={"privacy": spec.privacy.with_founder(me)})
        spec = _with_founder(self._which_founding(spec), me)
        self._network.come_to(spec.digest())
        was_in_it = self._has_met_somebody(spec.digest()) or self._was_in(spec.digest())
        if self._local.settings.initial_peers or was_in_it:
            self.founds = False
            run = await self._follow_first(
                partial(self._acquaintances.look_before_going_alone, spec.digest())
            )
            if run is not None:
                return run
            self._require_nobody_known()
            self.founds = True
        signed = sign_spec(spec, self._network.host.identity)
        store = BlobStore(self._local.home.run_directory(spec.digest()) / BLOBS_NAME)
        await asyncio.to_thread(store_initial, spec, path, store)
        digests = prepared.digests()
        for done, digest in enumerate(digests):
            self._local.status.advance(State.STARTING, "checks the data", done, len(digests))
            blob = prepared.held(digest)
            stored = await asyncio.to_thread(store.put_file, blob)
            if stored != digest:
                store.remove(stored)
                raise damaged_data(blob)
        for address in self._network.first_contacts:
            self._network.messenger.forget(parse_address(address)[0])
        return open_local_run(signed, store)

    def _which_founding(self, spec: RunSpec) -> RunSpec:
        """A run of this spec that this home was in last goes on, unless a new one is wanted."""
        known = self._acquaintances.runs
        runs = [memory for memory in known if memory.spec.unmarked == spec.unmarked]
        if not self._local.settings.new:
            recalled = self._acquaintances.memory = next(iter(runs), None)
            return spec if recalled is None else recalled.spec
        marked = spec.model_copy(update={"founding": secrets.token_hex(8)})
        for memory in runs[:1]:
            log.info(
                "founds run %s afresh; leaves run %s, whose checkpoints stay in %s",
                marked.digest()[:16],
                memory.run_digest[:16],
                self._local.home.run_directory(memory.run_digest),
            )
        return marked

    def _has_met_somebody(self, run_digest: str) -> bool:
        recalled = self._acquaintances.memory
        return recalled is not None and recalled.run_digest == run_digest and bool(recalled.members)

    def _was_in(self, run_digest: str) -> bool:
        """By what else is on the disk, where its memory of the run is gone: whoever founded it now
        would begin the same run a second time, beside those that train it."""
        if self._acquaintances.memory is not None:
            return False
        home = self._local.home
        is_damaged = any(home.run_directory(run_digest).glob("memory*.damaged"))
        views = ViewHistory(home.root, run_digest).read()
        if not (is_damaged or views or list_checkpoints(home.checkpoints(run_digest))):
            return False
        self.has_lost_memory = True
        log.warning(
            "this home was in run %s before, and what it remembered of it is gone: looks for its "
            "members before it goes on alone",
            run_digest[:16],
        )
        return True

    async def _take_up(self, recalled: Memory) -> Run:
        """Go where the others are. Where nobody is, a daemon that was told of no peers goes on from
        its own disk, if that has a whole checkpoint or this peer founded the run; others wait."""
        digest, pause_s = recalled.run_digest, LOOK_AGAIN_S
        store = BlobStore(self._local.home.run_directory(digest) / BLOBS_NAME)
        why_not = await asyncio.to_thread(self._why_not_alone, recalled, store)
        self.may_go_on_alone = not self._local.settings.initial_peers and not why_not
        if why_not and not self._local.settings.initial_peers:
            log.warning("cannot go on with run %s alone: %s", digest[:16], why_not)
        alone, known = self.may_go_on_alone, self._acquaintances
        while True:
            look = known.look_before_going_alone if alone else known.look_for_members
            run = await self._follow_first(partial(look, digest))
            if run is not None:
                return run
            if alone and not self._turned_away():
                self.founds = True
                log.info("takes up run %s (%s) alone", digest[:16], recalled.spec.name)
                if not await asyncio.to_thread(self._whole_step, recalled):
                    log.warning("no whole checkpoint of it is here: it begins again at step 0")
                return open_local_run(recalled.signed_spec, store)
            known.say_nobody_answers(digest, pause_s, self._complete_by)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_AGAIN_LIMIT_S)
            self._network.messenger.passed_over.clear()
            await known.call_again()

    async def _follow_first(self, look: Callable[[], Awaitable[Found | None]]) -> Run | None:
        """Join through the first who answers and can be followed; None where nobody is left.
        Who says that the run is complete, or has not got it, may lie: the next one is asked."""
        self._complete_by, complete = "", None
        while (found := await look()) is not None:
            try:
                return await self._join_found(found.peer_id, found.welcome)
            except UserError as error:
                log.warning("%s", error.cause)
                self._network.messenger.pass_over(found.peer_id, error.cause)
                if isinstance(error, RunComplete):
                    complete = error if self._is_known(found.peer_id) else complete
                    self._complete_by = found.peer_id
        if complete is not None:
            raise complete
        return None

    def _is_known(self, peer_id: str) -> bool:
        """Whether the user has named it, or it was met in this run."""
        given = set(peer_ids_of(self._local.settings.initial_peers))
        memory = self._acquaintances.memory
        met = {item.peer_id for item in memory.members} if memory is not None else set()
        return peer_id in given | met

    def _turned_away(self) -> str:
        """Why somebody who is known answers, and could not be followed; empty if there is none."""
        passed_over = self._network.messenger.passed_over
        return next((why for peer, why in passed_over.items() if self._is_known(peer)), "")

    def _require_nobody_known(self) -> None:
        """Who founds although its swarm is there would train apart."""
        if reason := self._turned_away():
            raise UserError(
                f"members of the run are there, but none can be joined: {reason}",
                ("try again in a minute", "to train apart from them: --new"),
                exit_code=UNREACHABLE,
            )

    def _why_not_alone(self, recalled: Memory, store: BlobStore) -> str:
        """What this disk lacks to go on by itself; empty if nothing."""
        founded_it = recalled.signed_spec.peer_id == self._network.me.peer_id
        if not (founded_it or self._whole_step(recalled) > 0):
            return "another founded it, and no whole checkpoint is here: start one of the others"
        if is_here(recalled.signed_spec, store):
            return ""
        remedy = "start one of the others, who have them"
        if founded_it:
            remedy += ", or make them anew with the line that founded it, p2p-dtfm --run FILE"
        return f"its manifest or tokenizer is missing or damaged in {store.root}: {remedy}"

    def _whole_step(self, recalled: Memory) -> int:
        """Of the newest whole checkpoint on this disk; 0 without one."""
        layers = layer_count(recalled.spec)
        saved = list_checkpoints(self._local.home.checkpoints(recalled.run_digest))
        whole = (it.manifest.step for it in saved if len(it.layers) == layers)
        return max(whole, default=0)

    def _progress_of_data(self) -> Progress:
        """Tells the status, from the thread that prepares the data."""
        loop = asyncio.get_running_loop()

        def tell(done_bytes: int, total_bytes: int, stage: str) -> None:
            what = f"prepares the data of the run, {stage}"
            loop.call_soon_threadsafe(
                self._local.status.advance, State.STARTING, what, done_bytes, total_bytes
            )

        return tell

    async def _join_run(self, run_digest: str) -> Run:
        self._local.status.say(State.JOINING, "asks which run is trained here")
        initial = peer_ids_of(self._local.settings.initial_peers)
        own, error = await self._network.host.addresses(), None
        while True:
            try:
                peer_id, welcome = await find_run(
                    self._network.messenger,
                    self._acquaintances.directory,
                    initial,
                    own,
                    run_digest,
                    lambda text: self._local.status.say(State.JOINING, text),
                )
            except UserError as nobody:
                raise (error or nobody) from nobody
            try:
                return await self._join_found(peer_id, welcome)
            except UserError as cause:
                log.warning("%s", cause.cause)
                self._network.messenger.pass_over(peer_id, cause.cause)
                if not isinstance(error, RunComplete):  # which is shown; the others only say things
                    error = cause

    async def _join_found(self, peer_id: str, welcome: Welcome) -> Run:
        """Learn the run and its members from one that has answered. Raises `UserError` where it
        cannot be followed."""
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
                self._network.messenger.forget(contact)  # a bootstrap node
        self._network.messenger.learn_named(welcome.peers)
        self._acquaintances.members_named = tuple(sorted(members))
        spec_digest = digest_bytes(welcome.run_spec.payload)
        store = BlobStore(self._local.home.run_directory(spec_digest) / BLOBS_NAME)
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

    def _from_own_disk(self, peer_id: str, welcome: Welcome, spec: RunSpec) -> Run | None:
        """Where one that was met before has gone on alone, and from much older states than are
        here: it comes over to where more is trained, and nothing is computed again."""
        recalled, run_digest = self._acquaintances.memory, digest_bytes(welcome.run_spec.payload)
        if recalled is None or recalled.run_digest != run_digest:
            return None
        store = BlobStore(self._local.home.run_directory(run_digest) / BLOBS_NAME)
        own = self._whole_step(recalled)
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
        self.founds = self.goes_on_from_own = True
        return open_local_run(recalled.signed_spec, store)

    async def _fetch_run(self, welcome: Welcome, store: BlobStore, peers: list[str]) -> Run:
        """Knock, for only who does is given the manifest; where many do, again for a while, and at
        others' doors."""
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


def _with_founder(spec: RunSpec, peer_id: str) -> RunSpec:
    """A run by invitation rests on its founder's word, and has a key for its directory."""
    if not spec.admission.is_invited or spec.admission.founder:
        return spec
    admission = AdmissionSpec(mode="invited", founder=peer_id, key=secrets.token_hex(32))
    return spec.model_copy(update={"admission": admission})


def _threads(settings: Settings, spec: RunSpec) -> int:
    """To compute with: in a run with audits no more than others believe."""
    wanted = settings.compute_threads
    if not spec.audit.rate or threads_believed(wanted) == wanted:
        return wanted
    log.warning(
        "computes with %d threads, not %d: members audit each other in this run, and believe "
        "nobody more than four for each core (set --threads lower to be rid of this)",
        threads_believed(wanted),
        wanted,
    )
    return threads_believed(wanted)


async def measure(local: Local, network: Network, run: Run) -> SelfRecord:
    """What this peer can do, and its links to those that it knows: its record, not yet signed."""
    settings, host = local.settings, network.host
    local.status.say(State.MEASURING, "times the layers on this device")
    device = select_device(settings.device)
    limit = _memory_limit_bytes(settings, device)
    measured = await local.compute.run(
        local.world.measure_device,
        run.spec,
        settings.device,
        _threads(settings, run.spec),
        limit,
        _progress_of_measuring(local),
    )
    measured = within_resident_limit(settings, measured)
    local.compute.device = device
    local.compute.stage_runner = local.world.stage_runner(measured, settings.device)
    record = SelfRecord(network.me, run.digest, measured, await host.addresses(), network.probes)
    record.state_name(settings.name)
    record.state_swarm({network.me.peer_id, *network.others()})
    record.state_reachability(await host.addresses(), network.reachability.finding.reachability)
    if (shaper := host.shaper) is not None:
        record.state_line(shaper.uplink_bytes_per_s, shaper.downlink_bytes_per_s)
    await record.probe_all(
        network.others(),
        network.messenger,
        lambda done, total: local.status.advance(
            State.MEASURING, "measures the links to the other peers", done, total
        ),
    )
    return record


def _memory_limit_bytes(settings: Settings, device: TorchDevice) -> int | None:
    """For the plan. On an accelerator what torch takes there is capped as well, with room for what
    its libraries take to work in: an H200 was seen to need 0.2 GB of it."""
    limit_bytes = settings.memory_limit_bytes
    if limit_bytes is not None:
        cap_device_memory(device, limit_bytes + LIBRARIES_BYTES)
    return limit_bytes


def _progress_of_measuring(local: Local) -> Callable[[int, int], None]:
    loop = asyncio.get_running_loop()
    advance = local.status.advance

    def tell(done: int, total: int) -> None:
        what = "times the layers on this device"
        loop.call_soon_threadsafe(advance, State.MEASURING, what, done, total)

    return tell


def damaged_data(blob: Path) -> UserError:
    """A founder's own data are not what their manifest says."""
    return UserError(
        f"the data shard {blob} is damaged: its bytes are not those that were prepared",
        f"remove {blob.parents[1]} and make the data anew; "
        "for your own text: p2p-dtfm prepare PATH... --out DIR",
    )
