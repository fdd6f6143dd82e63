"""The ways into a run: found it with its data, ask others for it, or take up the last one."""

import asyncio
import logging
import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.core.protocol.run_spec import AdmissionSpec, RunSpec
from p2p_dtfm.daemon.machine.home import home_option
from p2p_dtfm.daemon.node.acquaintances import (
    LOOK_AGAIN_LIMIT_S,
    LOOK_AGAIN_S,
    Acquaintances,
    meeting_points,
)
from p2p_dtfm.daemon.node.join.leads import Leads
from p2p_dtfm.daemon.node.join.own_disk import was_in, whole_step, why_not_alone
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.node.network import Network
from p2p_dtfm.daemon.peers.home_memory import Memory
from p2p_dtfm.daemon.peers.run_source import (
    Run,
    RunComplete,
    open_local_run,
    prepare_run,
    sign_spec,
)
from p2p_dtfm.daemon.state_transfer.initial_states import store_initial
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.net.contacts.addresses import parse_address
from p2p_dtfm.ports import chance
from p2p_dtfm.sim.scenario.files import find_run_spec
from p2p_dtfm.train.data import BLOBS_NAME, BlobStore, Progress

CHANGES_TOLD = 3
FOUNDING_BYTES = 8
CHANGE_CHARACTERS = 24

log = logging.getLogger("p2p_dtfm")


class RunJoining:
    """Founds or joins a run. `founds`: nobody else is there, so this peer makes the first view.
    `may_go_on_alone`: it may do so later, if those that it has found die."""

    def __init__(self, local: Local, network: Network, acquaintances: Acquaintances) -> None:
        self.founds = self.may_go_on_alone = local.settings.founds
        self.has_lost_memory = False
        """This home was in the run that it founds, and remembers nobody. Members may find it
        yet."""
        self._local = local
        self._network = network
        self._acquaintances = acquaintances
        self._leads = Leads(local, network, acquaintances)

    @property
    def goes_on_from_own(self) -> bool:
        """Whether this peer has come further than the one that trains, which will come over."""
        return self._leads.goes_on_from_own

    @property
    def _waits_for_others(self) -> bool:
        """Whether this peer was told of peers to join. Otherwise it goes on by itself where nobody
        is."""
        return bool(self._local.settings.initial_peers) and not self._local.founds

    async def enter_run(self) -> Run:
        """Found the run, join it, or take up the last one."""
        run = await self._enter_run()
        self.founds |= self.goes_on_from_own
        return run

    async def _enter_run(self) -> Run:
        settings, recalled = self._local.settings, self._acquaintances.memory
        if settings.run:
            return await self._found_run()
        if recalled is None:
            return await self._ask_which_run()
        if self._waits_for_others and meeting_points(settings, self._network):
            try:
                return await self._ask_which_run()
            except UserError as error:
                if error.exit_code != UNREACHABLE:
                    raise
                log.warning("%s", error.cause)
        return await self._take_up(recalled)

    async def _ask_which_run(self) -> Run:
        """Join a run that the peers name. It may be another one than was expected, so what this
        home remembers of that run is recalled."""
        run = await self._leads.ask_which_run(self._local.settings.run_digest)
        known = self._acquaintances
        known.memory = next((it for it in known.runs if it.run_digest == run.digest), None)
        return run

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
            run = await self._leads.follow_first(
                partial(self._acquaintances.look_before_going_alone, spec.digest())
            )
            if run is not None:
                return run
            self._leads.require_nobody_known()
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
        self._forget_first_contacts()
        return open_local_run(signed, store)

    def _forget_first_contacts(self) -> None:
        """Forget the first contacts. They are no members, else they would have been followed."""
        for address in self._network.first_contacts:
            self._network.messenger.forget(parse_address(address)[0])

    def _which_founding(self, spec: RunSpec) -> RunSpec:
        """The spec to found. A run of this spec that this home was in last goes on, unless a new
        one is wanted."""
        known = self._acquaintances.runs
        runs = [memory for memory in known if memory.spec.unmarked == spec.unmarked]
        if not self._local.settings.new:
            recalled = self._acquaintances.memory = next(iter(runs), None)
            if recalled is None:
                self._tell_of_namesake(spec)
            return spec if recalled is None else recalled.spec
        marked = spec.model_copy(update={"founding": chance.token_bytes(FOUNDING_BYTES).hex()})
        for memory in runs[:1]:
            log.info(
                "founds run %s afresh; leaves run %s, whose checkpoints stay in %s",
                marked.digest()[:16],
                memory.run_digest[:16],
                self._local.home.run_directory(memory.run_digest),
            )
        return marked

    def _tell_of_namesake(self, spec: RunSpec) -> None:
        """Warn that a changed run spec is another run, which begins at step 0. A user that meant to
        go on with the last run hears how."""
        known = self._acquaintances.runs
        before = next((it for it in known if it.spec.name == spec.name), None)
        if before is None:
            return
        home = self._local.home
        log.warning(
            "this is another run than %s, the last one of that name here (%s): the checkpoints of "
            "that one stay in %s, and p2p-dtfm%s --run-digest %s goes on with it",
            before.run_digest[:16],
            _changes(before.spec, spec),
            home.run_directory(before.run_digest),
            home_option(home.root),
            before.run_digest[:16],
        )

    def _has_met_somebody(self, run_digest: str) -> bool:
        recalled = self._acquaintances.memory
        return recalled is not None and recalled.run_digest == run_digest and bool(recalled.members)

    def _was_in(self, run_digest: str) -> bool:
        """Whether this home was in the run though its memory of it is gone. Founding it now would
        begin the same run a second time, beside those that train it."""
        if self._acquaintances.memory is not None:
            return False
        if not was_in(self._local.home, run_digest):
            return False
        self.has_lost_memory = True
        log.warning(
            "this home was in run %s before, and what it remembered of it is gone: looks for its "
            "members before it goes on alone",
            run_digest[:16],
        )
        return True

    async def _take_up(self, recalled: Memory) -> Run:
        """Go to where the others are. If nobody is found, a daemon that was told of no peers may go
        on from its own disk. For that the disk has a whole checkpoint, or this peer founded the
        run. Other daemons wait, unless the last step is here."""
        digest, pause_s = recalled.run_digest, LOOK_AGAIN_S
        last_step = recalled.spec.total_steps
        store = BlobStore(self._local.home.run_directory(digest) / BLOBS_NAME)
        home, me = self._local.home, self._network.me.peer_id
        why_not = await asyncio.to_thread(why_not_alone, home, me, recalled, store)
        self.may_go_on_alone = not self._waits_for_others and not why_not
        if why_not and not self._waits_for_others:
            log.warning("cannot go on with run %s alone: %s", digest[:16], why_not)
        alone, known = self.may_go_on_alone, self._acquaintances
        while True:
            look = known.look_before_going_alone if alone else known.look_for_members
            run = await self._leads.follow_first(partial(look, digest))
            if run is not None:
                return run
            if alone and known.turned_away() is None:
                self.founds = True
                if self._local.founds:
                    self._forget_first_contacts()
                log.info("takes up run %s (%s) alone", digest[:16], recalled.spec.name)
                known.other_versions.say_apart(recalled)
                if not await asyncio.to_thread(whole_step, home, recalled):
                    log.warning("no whole checkpoint of it is here: it begins again at step 0")
                return open_local_run(recalled.signed_spec, store)
            if not alone and await asyncio.to_thread(whole_step, home, recalled) == last_step:
                raise self._leads.with_own_model(RunComplete(digest[:16], last_step))
            could_go_on = not alone and not why_not
            complete_by = self._leads.complete_by
            known.say_nobody_answers(digest, pause_s, complete_by, could_go_on, not why_not)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_AGAIN_LIMIT_S)
            self._network.messenger.passed_over.clear()
            await known.call_again()

    def _progress_of_data(self) -> Progress:
        """A callback that tells the status, from the thread that prepares the data."""
        loop = asyncio.get_running_loop()

        def tell(done_bytes: int, total_bytes: int, stage: str) -> None:
            what = f"prepares the data of the run, {stage}"
            loop.call_soon_threadsafe(
                self._local.status.advance, State.STARTING, what, done_bytes, total_bytes
            )

        return tell


def _with_founder(spec: RunSpec, peer_id: str) -> RunSpec:
    """Name the founder and a key for the directory, if the run is by invitation. Such a run rests
    on its founder's word."""
    if not spec.admission.is_invited or spec.admission.founder:
        return spec
    admission = AdmissionSpec(mode="invited", founder=peer_id, key=secrets.token_hex(32))
    return spec.model_copy(update={"admission": admission})


def _changes(before: RunSpec, after: RunSpec) -> str:
    """What the file says otherwise now, of which the first few are told."""
    was, is_now = (dict(_leaves(spec.unmarked.model_dump(mode="json"))) for spec in (before, after))
    differ = [key for key in was | is_now if was.get(key) != is_now.get(key)]
    told = (
        f"{key} is {_in_short(is_now.get(key))}, was {_in_short(was.get(key))}"
        for key in differ[:CHANGES_TOLD]
    )
    return "; ".join(told)


def _in_short(value: object) -> str:
    return "not stated" if value in (None, "") else str(value)[:CHANGE_CHARACTERS]


def _leaves(table: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield before + key, value


def damaged_data(blob: Path) -> UserError:
    """The fault of a founder whose data are not what their manifest says."""
    return UserError(
        f"the data shard {blob} is damaged: its bytes are not those that were prepared",
        f"remove {blob.parents[1]} and make the data anew; "
        "for your own text: p2p-dtfm prepare PATH... --out DIR",
    )
