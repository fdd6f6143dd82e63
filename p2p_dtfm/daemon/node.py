"""The daemon: joins core, net and train, and turns actions into calls and results into events."""

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from p2p_dtfm import __version__
from p2p_dtfm.core.actions import (
    Actions,
    ComputePlan,
    Halt,
    Left,
    Rejoin,
    Report,
    SendMessage,
    StopStep,
    TakeOver,
    ViewAgreed,
)
from p2p_dtfm.core.agreement import Agreement
from p2p_dtfm.core.agreement_messages import Contribution, Heartbeat, JoinRequest
from p2p_dtfm.core.canonical import decode, digest_bytes, encode
from p2p_dtfm.core.errors import PeerFault, UserError
from p2p_dtfm.core.liveness import LAN_LIVENESS, Liveness
from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.planner import compute_plan
from p2p_dtfm.core.records import PROTOCOL_VERSION, Intent, PeerRecord, open_record
from p2p_dtfm.core.signed import Signed
from p2p_dtfm.core.snapshot import Member, Snapshot, ViewId
from p2p_dtfm.core.step import Prepared, StepOutcome
from p2p_dtfm.core.view import View
from p2p_dtfm.core.workload import workload_of
from p2p_dtfm.daemon.checkpoints import Checkpoints
from p2p_dtfm.daemon.compute import Compute
from p2p_dtfm.daemon.courier import PEERS_LIMIT, Courier
from p2p_dtfm.daemon.dashboard_host import DashboardHost
from p2p_dtfm.daemon.device_lock import only_daemon_on
from p2p_dtfm.daemon.discovery import ask_present, find_run
from p2p_dtfm.daemon.disk import keep_under
from p2p_dtfm.daemon.donor import Donor
from p2p_dtfm.daemon.event_log import EventLog
from p2p_dtfm.daemon.home import Home
from p2p_dtfm.daemon.initial_states import InitialStates, store_initial
from p2p_dtfm.daemon.observer import Observer
from p2p_dtfm.daemon.run_source import (
    Run,
    fetch_blob,
    fetch_run,
    found_run,
    open_local_run,
)
from p2p_dtfm.daemon.run_spec_file import resolve_run_spec
from p2p_dtfm.daemon.self_record import SelfRecord
from p2p_dtfm.daemon.settings import Settings
from p2p_dtfm.daemon.status import State, Status
from p2p_dtfm.daemon.step_recorder import StepRecorder
from p2p_dtfm.daemon.trace_collector import STEPS_LIMIT, TraceCollector, peer_traces_json
from p2p_dtfm.daemon.trainer import Tools, Trainer
from p2p_dtfm.daemon.wire import (
    AGREEMENT,
    CheckpointFiles,
    FollowDone,
    FollowEnded,
    FollowLayers,
    Hello,
    KnownPeers,
    LayerOffered,
    LayerReceipt,
    LayersCommitted,
    Message,
    PeerAddress,
    TraceRequest,
    Welcome,
    unpack,
)
from p2p_dtfm.net.addresses import parse_address
from p2p_dtfm.net.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.net.bulk import BulkPlane
from p2p_dtfm.net.control import ControlPlane
from p2p_dtfm.net.directory import Directory, Presence
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.frames import FrameHeader, FrameLimits
from p2p_dtfm.net.host import Host
from p2p_dtfm.net.identity import verify
from p2p_dtfm.net.probing import Probes
from p2p_dtfm.net.shaping import LineLimit, Shape, Shaper
from p2p_dtfm.train.batches import Batches
from p2p_dtfm.train.checkpoint import list_checkpoints, load_layer
from p2p_dtfm.train.data import BlobStore, Dataset
from p2p_dtfm.train.emulated import EmulatedStageRunner, emulated_flops_per_s
from p2p_dtfm.train.measure import exclusive_name, measure_device, select_device
from p2p_dtfm.train.model import layer_count
from p2p_dtfm.web.api import LocalApi, make_app

log = logging.getLogger("p2p_dtfm")

FOLLOWING = (
    FollowLayers,
    LayerOffered,
    LayersCommitted,
    LayerReceipt,
    FollowEnded,
    FollowDone,
)
TICK_S = 0.1
DATA_KEPT_LIMIT_BYTES = 2 << 30
DATA_RETRY_S = 5.0
PRESENCE_REFRESH_S = 20.0
RECORD_REFRESH_S = 1.0
REPLAN_QUIET_S = 5.0
REPLAN_INTERVAL_S = 60.0
"""A peer asks for a new plan at most this often; others' requests count apart."""
"""How long this peer's own facts must be unchanged before they are worth a new plan."""
LINKS_WAIT_S = 8.0
JOIN_RETRY_S = 1.0
DONE_WAIT_S = 60.0
ORPHAN_GRACE_S = 15.0
"""A daemon whose parent has died hands its layers over within this time, or ends without."""
HISTORY_LIMIT = 256
DEFAULT_RUN = "tiny"


class Daemon:
    """One peer. `run` lives until the run is done and it may exit, or it is asked to leave."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.status = Status()
        self.observer = Observer(self.status)
        self._recorder = StepRecorder()
        self._dashboard = DashboardHost(self.observer, {"leave": self._ask_to_leave})
        self.home = Home(settings.home)
        self.compute = Compute()
        self.views: list[dict[str, Any]] = []
        self._life = 0
        self._signalled = False
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()
        self._failed: asyncio.Future[None] | None = None
        self._run: Run | None = None
        self._agreement: Agreement | None = None
        self._trainer: Trainer | None = None
        self._checkpoints: Checkpoints | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._liveness = Liveness(LAN_LIVENESS)
        self._troubled: set[str] = set()
        """Peers with whom a tensor was lost since the last commit."""
        self._learnt: dict[str, Signed] = {}
        self._training: asyncio.Task[Any] | None = None
        self._welcomed_by = ""
        self._founds = settings.founds
        self.pause_reason: str | None = None
        """Why this peer left, if it is to come back."""
        self._replanned_s = -REPLAN_INTERVAL_S

    # life -------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Returns the exit code. Raises `UserError`."""
        self._refuse_emulation_among_strangers()
        self.home.acquire()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.home.release)
            stack.callback(self.observer.close)
            stack.callback(self.compute.close)
            self._failed = asyncio.get_running_loop().create_future()
            self._handle_signals()
            self._life = self.home.next_life()
            if not await self._unless_leaving(self._start(stack)):
                log.info("left before it took part")
                return 0
            return await self._until_end()

    def _refuse_emulation_among_strangers(self) -> None:
        """What an emulated device sends would undo the training of everybody else."""
        if emulated_flops_per_s(self.settings.device) is not None and self.settings.shape is None:
            raise UserError(
                f"device {self.settings.device!r}: an emulated device computes nothing, so it may "
                "only be part of a scenario's swarm",
                ("use --device auto", "or: p2p-dtfm demo --scenario NAME"),
            )

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        stack.enter_context(only_daemon_on(exclusive_name(select_device(self.settings.device))))
        await self._start_network(stack)
        await self._start_run(stack)
        await self._measure()
        if self._founds:
            await self._print_invitation()
        await self._take_part()

    async def _unless_leaving(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether `work` came to its end; it is cancelled when this peer is told to leave."""
        working = asyncio.create_task(work)
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

        if self.settings.until_stdin_closes:
            threading.Thread(target=self._watch_stdin, args=(loop,), daemon=True).start()

    def _watch_stdin(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(self._begin_to_leave)
            threading.Event().wait(ORPHAN_GRACE_S)
            os._exit(130)

    def _on_signal(self) -> None:
        if self._signalled:
            log.warning("ends at once")
            logging.shutdown()
            os._exit(130)  # waits for no thread; p2pd ends with this process
        self._signalled = True
        self.pause_reason = None
        log.info("leaves after this step; a second signal ends at once")
        self._begin_to_leave()

    def pause(self, reason: str) -> None:
        """Leave like any peer, but to come back: `run` ends with `pause_reason` set."""
        if not self._leaving.is_set():
            self.pause_reason = reason
            self._begin_to_leave()

    def acquaintances(self) -> tuple[str, ...]:
        """Where the other members of the last view are, for coming back."""
        members = self.views[-1]["members"] if self.views else []
        return tuple(address for peer_id in members for address in self._courier.where(peer_id))

    @property
    def run_digest(self) -> str:
        """Of the run that it took part in, or empty."""
        return self._run.digest if self._run is not None else ""

    def _begin_to_leave(self) -> None:
        self.status.say(State.LEAVING, "finishes the step and hands its layers to the others")
        self._leaving.set()

    async def _start_network(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self.settings
        self.status.say(State.STARTING, "starts libp2p")
        self._host = await Host.start(
            self.home.identity, settings.listen, settings.announce, settings.initial_peers
        )
        stack.push_async_callback(self._host.close)
        if settings.shape is not None:
            self._host.shaper = Shaper(Shape.load(settings.shape), self._host.peer_id)
            self._spawn(self._host.shaper.follow(settings.shape))
            log.info("shaped links: %s", self._host.shaper.label)
        elif settings.uplink_mbps or settings.downlink_mbps:
            self._host.shaper = LineLimit(
                bytes_per_s(settings.uplink_mbps), bytes_per_s(settings.downlink_mbps)
            )
        self._me = Member(self._host.peer_id, self._life)
        log.info("peer %s", self._host.peer_id)
        self._control = await ControlPlane(self._host, self._serve).ready()
        stack.push_async_callback(self._control.close)
        self._courier = Courier(
            self._host, self._control, self._life, self._on_heard, self._on_call_failed
        )
        stack.push_async_callback(self._courier.close)
        self._traces = TraceCollector(self._recorder, self._courier, self._host)
        self.observer.meets(self._courier)
        self.observer.marks = laboratory_marks(settings, self._host)
        await self._start_api(stack)
        for address in settings.initial_peers:
            peer_id, where = parse_address(address)
            self._courier.learn(peer_id, (where,))
        self._directory = await Directory.start(self._host, settings.initial_peers)
        stack.push_async_callback(self._directory.close)
        self._probes = await Probes(self._host).ready()
        self._blobs = await BlobExchange(self._host, self._open_blob, self._on_fault).ready()

    async def _start_run(self, stack: contextlib.AsyncExitStack) -> None:
        if self._founds:
            run = await self._found_run()
        else:
            run = await self._join_run(self.settings.run_digest)
        self._run = run
        self._workload = workload_of(run.spec)
        self._events = EventLog(self.home.run_directory(run.digest) / "events.jsonl")
        limits = FrameLimits(payload_bytes=max(64 << 20, self._workload.boundary_bytes))
        self._bulk = BulkPlane(
            self._host,
            run.digest,
            limits,
            self._on_frame,
            self._on_fault,
            self._on_lost,
            on_undelivered=self._on_undelivered,
        )
        await self._bulk.ready()
        stack.push_async_callback(self._bulk.close)
        self._agreement = Agreement(
            self._me, run.digest, self._workload, self._host.identity.sign, verify
        )
        self.observer.trains(run.spec, run.digest, self._workload, self._agreement)
        self._make_trainer(run)
        assert self._trainer is not None and self._checkpoints is not None
        stack.push_async_callback(self._trainer.close)
        stack.push_async_callback(self._checkpoints.close)
        stack.callback(self._cancel_tasks)

    async def _start_api(self, stack: contextlib.AsyncExitStack) -> None:
        readers = {
            "status": self.status_json,
            "plan": self.plan_json,
            "peers": self.peers_json,
            "history": self.history_json,
            "dashboard": self._dashboard.invitation,
        }
        await self._dashboard.start(self.settings.dashboard, self.home.root)
        stack.push_async_callback(self._dashboard.close)
        actions = {"leave": self._ask_to_leave, "pause": self._ask_to_pause}
        questions = {"trace": self._trace_json}
        self._api = LocalApi(make_app(readers, actions, questions), self.home.socket)
        await self._api.start()
        stack.push_async_callback(self._api.close)
        if self._dashboard.address is not None:
            log.info("dashboard %s", self._dashboard.address)

    def _make_trainer(self, run: Run) -> None:
        directory = self.home.run_directory(run.digest)
        for leftover in ("scratch", "offers"):  # of a process that was killed
            shutil.rmtree(directory / leftover, ignore_errors=True)
        for leftover in run.blobs.root.glob(".*"):
            leftover.unlink(missing_ok=True)
        scratch = directory / "scratch"
        scratch.mkdir(exist_ok=True)
        self._offers = BlobStore(directory / "offers")
        self._checkpoints = Checkpoints(
            self.home.checkpoints(run.digest),
            run.spec,
            self._blobs,
            self.compute,
            self._announce,
            self._has_stage,
        )
        dataset = Dataset(run.manifest, run.blobs.path, run.spec.model.context)
        tools = Tools(
            me=self._me.peer_id,
            spec=run.spec,
            batches=Batches(dataset, run.spec),
            courier=self._courier,
            bulk=self._bulk,
            blobs=self._blobs,
            compute=self.compute,
            checkpoints=self._checkpoints,
            donor=Donor(self._courier, self._bulk, self.compute, self._offers),
            initial=InitialStates(
                run.spec,
                run.blobs,
                self._blobs,
                self.compute,
                self.status,
                lambda: [peer for peer in self._courier.known if peer != self._me.peer_id],
            ),
            scratch=scratch,
            status=self.status,
            recorder=self._recorder,
        )
        self._trainer = Trainer(tools, self)
        self._trainer.on_record(self._on_step)

    async def _found_run(self) -> Run:
        self.status.say(State.STARTING, "prepares the data of the run")
        path = resolve_run_spec(self.settings.run or DEFAULT_RUN)
        scratch = self.home.root / "prepared"
        spec, signed, prepared = await asyncio.to_thread(
            found_run, path, self._host.identity, scratch
        )
        if await self._is_trained_already(spec.digest()):
            self._founds = False
            return await self._join_run(spec.digest())
        store = BlobStore(self.home.run_directory(spec.digest()) / "blobs")
        await asyncio.to_thread(store_initial, spec, path, store)
        for digest in prepared.digests():
            blob = prepared.path(digest)
            assert blob is not None
            stored = await asyncio.to_thread(store.put_file, blob)
            if stored != digest:
                store.remove(stored)
                raise damaged_data(blob)
        for address in self.settings.initial_peers:
            self._courier.forget(parse_address(address)[0])
        return open_local_run(signed, store)

    async def _is_trained_already(self, run_digest: str) -> bool:
        """Whether this very run has members: a founder that comes back joins them."""
        if not self.settings.initial_peers:
            return False
        own = await self._host.addresses()
        found = await ask_present(self._courier, self._directory, own, run_digest)
        return found is not None

    async def _print_invitation(self) -> None:
        run = self._run
        assert run is not None
        addresses = await self._host.addresses()
        log.info("founded run %s (%s)", run.digest[:16], run.spec.name)
        lines = ["", "others join with one of these lines:"]
        lines += [f"  p2p-dtfm --initial-peers {address}" for address in addresses]
        lines += [
            f"  p2p-dtfm --initial-peers {address} --run-digest {run.digest}"
            for address in self.settings.initial_peers
        ]
        print("\n".join(lines), flush=True)

    async def _join_run(self, run_digest: str) -> Run:
        self.status.say(State.JOINING, "asks which run is trained here")
        initial = [parse_address(address)[0] for address in self.settings.initial_peers]
        own = await self._host.addresses()
        self._welcomed_by, welcome = await find_run(
            self._courier,
            self._directory,
            initial,
            own,
            run_digest,
            lambda text: self.status.say(State.JOINING, text),
        )
        members = {self._welcomed_by, *(peer.peer_id for peer in welcome.peers)}
        for peer_id in set(initial) - members:
            self._courier.forget(peer_id)  # a bootstrap node
        for peer in welcome.peers:
            self._courier.learn(peer.peer_id, peer.addresses)
        spec_digest = digest_bytes(welcome.run_spec.payload)
        store = BlobStore(self.home.run_directory(spec_digest) / "blobs")
        peers = list(dict.fromkeys([self._welcomed_by, *self._courier.known]))
        run = await fetch_run(welcome, store, self._blobs, peers)
        if welcome.step > run.spec.total_steps:
            raise UserError(
                f"run {spec_digest[:16]} is complete: all {run.spec.total_steps} steps are done",
                "found a new run, or ask a member for the model",
                exit_code=5,
            )
        log.info("%s", run.manifest.notes.describe())
        log.info("takes part in run %s (%s)", run.digest[:16], run.spec.name)
        return run

    # measuring --------------------------------------------------------------------------------

    async def _measure(self) -> None:
        assert self._run is not None
        settings = self.settings
        self.status.say(State.MEASURING, "times the layers on this device")
        device = select_device(settings.device)
        limit = int(settings.memory_gib * (1 << 30)) or None
        emulated = emulated_flops_per_s(settings.device)
        measured = await self.compute.run(
            measure_device, self._run.spec, device, settings.compute_threads, limit, emulated
        )
        if emulated is not None:
            self.compute.stage_runner = partial(EmulatedStageRunner, measured)
        self._self_record = SelfRecord(
            self._me, self._run.digest, measured, await self._host.addresses(), self._probes
        )
        if (shaper := self._host.shaper) is not None:
            self._self_record.state_line(shaper.uplink_bytes_per_s, shaper.downlink_bytes_per_s)
        await self._self_record.probe_all(
            [peer for peer in self._courier.known if peer != self._me.peer_id],
            self._courier,
            lambda text: self.status.say(State.MEASURING, text),
        )
        self._set_record()

    def _set_record(self, intent: Intent | None = None) -> None:
        assert self._agreement is not None
        record, signed = self._self_record.make(self._host.identity.sign, intent)
        self._agreement.set_record(record, signed)

    # taking part ------------------------------------------------------------------------------

    async def _take_part(self) -> None:
        assert self._run is not None and self._trainer is not None
        await self._resume_from_checkpoint()
        self._spawn(self._tick_loop())
        self._spawn(self._presence_loop())
        if self._disk_limit_bytes:
            directory = self.home.run_directory(self._run.digest)
            self._spawn(keep_under(self.home.root, directory, self._disk_limit_bytes))
        self._spawn(self._record_loop())
        self._spawn(self._data_loop())
        self._spawn(self._timeline_loop())
        self._training = self._spawn(self._trainer.run())
        self._spawn(self._found_loop() if self._founds else self._join_loop())

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
            self._trainer.adopt(states, step)
            held = dict.fromkeys(states, step)
            lineage = checkpoint.manifest.lineage
            self._agreement.resume(step, held, lineage, self._checkpoints.saved)
            log.info("goes on from the checkpoint of step %d", step)
            return

    async def _found_loop(self) -> None:
        """Wait for the expected newcomers, for a bounded time; then make the first view."""
        agreement, expected = self._agreement, self.settings.expect_peers
        assert agreement is not None
        end_s = time.monotonic() + self.settings.expect_wait_s
        while len(agreement.joiners) + 1 < expected and time.monotonic() < end_s:
            present = len(agreement.joiners) + 1
            self.status.say(State.WAITING, f"{present} of {expected} expected peers are here")
            await asyncio.sleep(TICK_S)
        end_s = min(end_s, time.monotonic() + LINKS_WAIT_S)
        while not links_are_measured(agreement.joiners) and time.monotonic() < end_s:
            self.status.say(State.WAITING, "the newcomers measure the links between them")
            await asyncio.sleep(TICK_S)
        self._do(agreement.found(time.monotonic_ns()))

    async def _join_loop(self) -> None:
        """Ask members to be let in until there is a view with this peer."""
        agreement = self._agreement
        assert agreement is not None
        number = 0
        while agreement.view is None:
            if not agreement.attempting and agreement.next_view is None:
                members = [p for p in (self._welcomed_by, *self._courier.known) if p]
                member = members[number % len(members)]
                number += 1
                self.status.say(State.JOINING, f"asks {member} to be let in at the next view")
                await self._ask_to_be_let_in(member, agreement)
            await asyncio.sleep(JOIN_RETRY_S)

    async def _ask_to_be_let_in(self, member: str, agreement: Agreement) -> None:
        try:
            reply = await self._courier.ask(member, agreement.wants_view())
            for peer in decode(reply, KnownPeers).peers:
                self._courier.learn(peer.peer_id, peer.addresses)
        except (Unreachable, PeerFault) as error:
            log.debug("not let in yet: %s", error)

    async def _tick_loop(self) -> None:
        assert self._agreement is not None
        while True:
            await asyncio.sleep(TICK_S)
            now_ns = time.monotonic_ns()
            self._beat(self._agreement, now_ns)
            self._do(self._agreement.tick(now_ns))

    async def _timeline_loop(self) -> None:
        """While a page is open, show it a late step of this peer's pipeline."""
        agreement = self._agreement
        assert agreement is not None
        await self._traces.keep_timeline(
            lambda: agreement.view, lambda: self._dashboard.watched, self.observer.show_timeline
        )

    def _beat(self, agreement: Agreement, now_ns: int) -> None:
        """Say that this peer lives, and find out who does not."""
        assert self._trainer is not None
        watched = set()
        for view in (agreement.view, agreement.next_view):
            if view is not None and agreement.me in view.members:
                watched |= set(view.member_ids)
        self._liveness.watch(watched - {self._me.peer_id}, now_ns)
        for suspicion in self._liveness.tick(now_ns):
            self._do(agreement.suspect(suspicion.peer_id, suspicion.reason, now_ns))
        for peer_id in self._liveness.due_heartbeats(now_ns):
            beat = Heartbeat(agreement.me, self.compute.done_count, self.compute.is_idle)
            self._courier.tell(peer_id, beat)

    def _on_call_failed(self, peer_id: str) -> None:
        self._liveness.stream_reset(peer_id, time.monotonic_ns())

    def _on_heard(self, peer_id: str) -> None:
        self._liveness.heard(peer_id, time.monotonic_ns())

    async def _presence_loop(self) -> None:
        assert self._run is not None
        addresses = await self._host.addresses()
        presence = Presence(
            peer_id=self._me.peer_id,
            life=self._life,
            addresses=addresses,
            run_digest=self._run.digest,
        )
        while True:
            try:
                await self._directory.publish_run(self._run.digest, self._run.signed_spec)
                await self._directory.publish_presence(presence)
                for peer in await self._directory.present_peers(self._run.digest):
                    self._courier.learn(peer.peer_id, peer.addresses)
            except Unreachable as error:
                log.warning("directory: %s", error)
            await asyncio.sleep(PRESENCE_REFRESH_S)

    async def _record_loop(self) -> None:
        """Keep the record up to date: links to peers that turned up later, and live traffic.

        Facts that are news to the view in force are worth a new plan, once things are quiet.
        """
        quiet_since_s = time.monotonic()
        while not self._leaving.is_set():
            await asyncio.sleep(RECORD_REFRESH_S)
            waiting = self._self_record.unmeasured(self._courier.known)
            changed = False
            for peer_id in waiting:
                changed = await self._self_record.probe_one(peer_id, self._courier) or changed
            changed = self._self_record.learn_from_traffic(self._bulk.link_estimate) or changed
            if changed:
                self._set_record()
                quiet_since_s = time.monotonic()
            elif time.monotonic() - quiet_since_s > REPLAN_QUIET_S:
                self._replan_if_news()
                quiet_since_s = time.monotonic()

    def _replan_if_news(self) -> None:
        """Ask for a view with this peer's present record, if the one in force has an older one."""
        agreement = self._agreement
        assert agreement is not None
        view = agreement.view
        if view is None or self._me not in view.members or len(view.members) == 1:
            return
        now_s = time.monotonic()
        if now_s - self._replanned_s < REPLAN_INTERVAL_S:
            return
        if self._self_record.is_news_to(view.snapshot):
            self._replanned_s = now_s
            self._do(agreement.request_replan("links were measured", time.monotonic_ns()))

    # actions of the agreement -------------------------------------------------------------------

    def _do(self, actions: Actions) -> None:
        assert self._agreement is not None and self._trainer is not None
        for action in actions:
            if isinstance(action, SendMessage):
                for peer_id in action.to:
                    self._courier.tell(peer_id, action.message)
            elif isinstance(action, ComputePlan):
                self._spawn(self._compute_plan(action.snapshot))
            elif isinstance(action, StopStep):
                self.status.say(State.WAITING, "a failure: the members agree on how to go on")
                self.observer.fault("a failure: the step under way has stopped")
                self._trainer.stop_step()
            elif isinstance(action, ViewAgreed):
                self._on_agreed(action)
            elif isinstance(action, TakeOver):
                self._on_take_over(action)
            elif isinstance(action, Rejoin):
                self._spawn(self._rejoin(action.reason))
            elif isinstance(action, Left):
                self._trainer.leave_views()
                self._left.set()
            elif isinstance(action, Halt):
                self._on_halt(action)
            elif isinstance(action, Report):
                log.info("%s", action.text)
                self.observer.note(action.text)

    async def _compute_plan(self, snapshot: Snapshot) -> None:
        assert self._agreement is not None
        plan = await asyncio.to_thread(compute_plan, snapshot)
        self._do(self._agreement.plan_computed(snapshot, plan, time.monotonic_ns()))

    def _on_agreed(self, action: ViewAgreed) -> None:
        assert self._trainer is not None
        view = action.view
        for record in view.snapshot.records:
            self._courier.learn(record.peer_id, record.addresses)
        log.info(
            "agreed on view %s: plan %s, %d members",
            view.id,
            view.plan.digest()[:12],
            len(view.members),
        )
        self._trainer.view_agreed(view, action.discard)

    def _on_take_over(self, action: TakeOver) -> None:
        assert self._trainer is not None
        view, step = action.view, action.step
        entry = {
            "view": view.id.number,
            "snapshot": view.id.snapshot,
            "plan": view.plan.digest(),
            "members": list(view.member_ids),
            "step": step,
        }
        self.views = [*self.views, entry][-HISTORY_LIMIT:]
        self._events.write("view", **entry)
        self.observer.view_took_over(view, step)
        log.info("view %s from step %d on", view.id, step)
        if isinstance(view.plan, NoPlan):
            self.status.say(State.WAITING, view.plan.reason)
            log.info("waiting: %s", view.plan.reason)
        for peer_id in view.member_ids:
            self._spawn(self._connect(peer_id))
        self._trainer.take_over(view, step, action.ledger, action.restart)
        if self._leaving.is_set():
            self._leave_now_or_ask()

    async def _rejoin(self, reason: str) -> None:
        """The others went on without this peer: keep its work, and come back as a newcomer."""
        trainer, agreement = self._trainer, self._agreement
        assert trainer is not None and agreement is not None and self._run is not None
        log.warning("rejoins: %s", reason)
        self.status.say(State.JOINING, f"rejoins: {reason}")
        trainer.stop_step()
        trainer.leave_views()
        self._life = await self._next_life()
        self._me = Member(self._me.peer_id, self._life)
        self._self_record.begin_life(self._me)
        record, signed = self._self_record.make(self._host.identity.sign)
        agreement.begin_life(record, signed)
        await self._join_loop()

    async def _next_life(self) -> int:
        """Without a number on disk that grows, a later start could speak as an earlier one."""
        while True:
            try:
                return self.home.next_life()
            except OSError as error:
                text = f"its life cannot be written down ({error}); free space on that disk"
                self.status.say(State.WAITING, text)
                await asyncio.sleep(DATA_RETRY_S)

    async def _connect(self, peer_id: str) -> None:
        try:
            await self._courier.connect(peer_id)
        except Unreachable as error:
            log.warning("%s", error)

    def _on_halt(self, action: Halt) -> None:
        path = self.home.root / f"disagreement-{action.snapshot.number}.msgpack"
        path.write_bytes(encode(action.snapshot))
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_exception(
                RuntimeError(
                    f"{action.reason}. This is a bug (version {__version__}): please report it "
                    f"with the file {path} of both peers"
                )
            )

    # what the trainer asks (Outlet) ---------------------------------------------------------------

    def say_prepared(self, prepared: Prepared, view: View) -> None:
        for peer_id in view.member_ids:
            self._courier.tell(peer_id, prepared)

    def committed(self, outcome: StepOutcome) -> None:
        assert self._agreement is not None
        self._troubled.clear()
        self._do(self._agreement.committed(outcome, time.monotonic_ns()))

    def states_changed(self) -> None:
        assert self._agreement is not None and self._trainer is not None
        assert self._checkpoints is not None
        held = self._trainer.held
        if held is not None:
            self._agreement.held = held

    def reduced(self, step: int, layers: set[int]) -> None:
        assert self._agreement is not None
        self._agreement.reduced(step, layers)

    def skip_to(self, step: int) -> None:
        assert self._agreement is not None
        self._agreement.skip_to(step)

    def trouble(self, peer_id: str, cause: str) -> None:
        """Once in a step it may be the link, and the step is repeated; twice it is the peer."""
        assert self._agreement is not None
        view, now_ns = self._agreement.view, time.monotonic_ns()
        if view is None or peer_id not in view.member_ids:
            return
        self._liveness.stream_reset(peer_id, now_ns)
        if peer_id in self._troubled:
            self._do(self._agreement.suspect(peer_id, cause, now_ns))
        else:
            self._troubled.add(peer_id)
            text = f"what goes to or comes from {peer_id} is lost: {cause}"
            self._do(self._agreement.repeat_step(text, now_ns))

    def _on_undelivered(self, peer_id: str, lane: str, failure: Refused | Unreachable) -> None:
        log.debug("frames of %s to %s are lost: %s", lane, peer_id, failure.cause)
        if self._trainer is None:
            return
        if lane == "state":
            self._trainer.undelivered(peer_id)
        else:
            self.trouble(peer_id, failure.cause)

    def lineage_at(self, step: int) -> str:
        assert self._agreement is not None
        return self._agreement.inventory.lineage.at(step) or ""

    def ready_for(self) -> ViewId | None:
        assert self._agreement is not None
        return self._agreement.ready_for

    def synced(self, view: ViewId) -> None:
        assert self._agreement is not None
        self.states_changed()
        self._do(self._agreement.synced(view))

    async def fetch_shards(self, digests: set[str]) -> None:
        assert self._run is not None
        sizes = self._run.manifest.blobs()
        for digest in sorted(digests):
            peers = [peer for peer in self._courier.known if peer != self._me.peer_id]
            await fetch_blob(self._run.blobs, self._blobs, digest, peers, sizes[digest])

    @property
    def _disk_limit_bytes(self) -> int:
        return int(self.settings.disk_gib * (1 << 30))

    async def _data_loop(self) -> None:
        """Bring all data here ahead of need, so that no peer's death takes the only copy along.

        Corpora above the limit stay with those whose steps read them.
        """
        assert self._run is not None
        sizes = self._run.manifest.blobs()
        limits = [DATA_KEPT_LIMIT_BYTES, self._disk_limit_bytes // 2]
        if sum(sizes.values()) > min(filter(None, limits)):
            return
        order = sorted(sizes)
        start = sum(self._me.peer_id.encode()) % len(order)  # not all fetch the same one first
        for digest in [*order[start:], *order[:start]]:
            while not self._run.blobs.has(digest):
                try:
                    await self.fetch_shards({digest})
                except (BlobUnavailable, OSError) as error:
                    log.debug("data: %s", error)
                    await asyncio.sleep(DATA_RETRY_S)

    def damaged_shard(self, digest: str) -> None:
        assert self._run is not None
        self._run.blobs.quarantine(digest)

    def _has_stage(self) -> bool:
        view = self._agreement.view if self._agreement is not None else None
        return view is not None and bool(view.layers_of(self._me.peer_id))

    def _announce(self, files: CheckpointFiles) -> None:
        if self._agreement is not None and self._agreement.view is not None:
            for peer_id in self._agreement.view.member_ids:
                self._courier.tell(peer_id, files)

    def _on_step(self, outcome: StepOutcome) -> None:
        self._events.write(
            "step",
            step=outcome.step,
            loss=outcome.loss,
            held_out_loss=outcome.held_out_loss,
            gradient_norm=outcome.gradient_norm,
            view=self.views[-1]["view"] if self.views else 0,
        )
        self.observer.step_committed(outcome)
        held_out = outcome.held_out_loss
        text = "" if held_out is None else f", held-out loss {held_out:.4f}"
        if outcome.loss is not None:
            log.log(
                logging.INFO if held_out is not None else logging.DEBUG,
                "step %d: loss %.4f%s",
                outcome.step,
                outcome.loss,
                text,
            )

    # what arrives -------------------------------------------------------------------------------

    async def _serve(self, sender: str, body: bytes) -> bytes:
        _, message = unpack(body)
        self._courier.heard(sender)
        if isinstance(message, Hello):
            return await self._welcome(sender, message)
        if self._agreement is None or self._trainer is None:
            raise PeerFault("this peer does not take part in a run yet", sender)
        if isinstance(message, TraceRequest):
            if sender not in self._members():
                raise PeerFault("asks for traces without a place in the view", sender)
            return self._traces.answer(message)
        try:
            self._receive(sender, message)
        except PeerFault as fault:
            log.warning("refused a %s of %s: %s", type(message).__name__, sender, fault.cause)
            raise
        return encode(self._known_peers()) if isinstance(message, JoinRequest) else b""

    def _known_peers(self) -> KnownPeers:
        """Members, and newcomers that wait, for another newcomer."""
        assert self._agreement is not None
        view = self._agreement.view
        records = (*(view.snapshot.records if view else ()), *self._agreement.joiners)
        return KnownPeers(tuple(PeerAddress(r.peer_id, r.addresses) for r in records))

    def _receive(self, sender: str, message: Message) -> None:
        assert self._agreement is not None and self._trainer is not None
        if isinstance(message, AGREEMENT):
            actions = self._agreement.receive(sender, message, time.monotonic_ns())
            self._learn_addresses(message)
            if isinstance(message, Heartbeat):
                self._liveness.heartbeat(
                    sender, message.progress, message.waits, time.monotonic_ns()
                )
            self._do(actions)
        elif isinstance(message, Prepared):
            if message.peer_id != sender:
                raise PeerFault("says Prepared for another peer", sender)
            self._trainer.prepared(message)
        elif isinstance(message, FOLLOWING):
            if isinstance(message, FollowLayers):
                self._require_follower(sender, message)
            self._trainer.following(sender, message)
        elif isinstance(message, CheckpointFiles):
            assert self._checkpoints is not None
            if sender in self._members():
                self._checkpoints.remote_files(sender, message)

    def _members(self) -> set[str]:
        """Of the view in force, and of the one that is to follow it."""
        assert self._agreement is not None
        views = (self._agreement.view, self._agreement.next_view)
        return {peer_id for view in views if view is not None for peer_id in view.member_ids}

    def _require_follower(self, sender: str, message: FollowLayers) -> None:
        """State goes to members; while a view is being agreed on, the others may know it first."""
        assert self._agreement is not None and self._run is not None
        if sender not in self._members() and not self._agreement.attempting:
            raise PeerFault("asks for layers without a place in the view", sender)
        layers = range(layer_count(self._run.spec))
        if len(message.layers) > len(layers) or not set(message.layers) <= set(layers):
            raise PeerFault("asks for layers that there are not", sender)

    def _learn_addresses(self, message: Any) -> None:
        """Newcomers must be answered before any view names them."""
        if isinstance(message, JoinRequest):
            self._learn_from_record(message.record)
        for contribution in getattr(message, "contributions", ()):
            opened = decode(contribution.payload, Contribution)
            for signed in (opened.record, *opened.joiners):
                self._learn_from_record(signed)

    def _learn_from_record(self, signed: Signed) -> None:
        """Where its signer says that it is; nobody else may say that."""
        assert self._run is not None
        if self._learnt.get(signed.peer_id) == signed:
            return
        try:
            record = open_record(signed, self._run.digest, verify)
        except PeerFault as fault:
            log.debug("addresses not learnt: %s", fault)
            return
        self._courier.learn(record.peer_id, record.addresses)
        if len(self._learnt) >= PEERS_LIMIT:
            self._learnt.clear()
        self._learnt[signed.peer_id] = signed

    async def _welcome(self, sender: str, message: Hello) -> bytes:
        if self._run is None or self._agreement is None:
            raise PeerFault("this peer has no run yet, try again in a moment", sender)
        if message.protocol_version != PROTOCOL_VERSION:
            log.warning("%s speaks protocol %d", sender, message.protocol_version)
        self._courier.learn(sender, message.addresses)
        own = PeerAddress(self._me.peer_id, await self._host.addresses())
        view = self._agreement.view
        records = view.snapshot.records if view is not None else ()
        peers = [PeerAddress(record.peer_id, record.addresses) for record in records]
        others = [peer for peer in peers if peer.peer_id not in (sender, own.peer_id)]
        return encode(
            Welcome(PROTOCOL_VERSION, self._run.signed_spec, (own, *others), self._agreement.step)
        )

    def _on_frame(
        self, sender: str, header: FrameHeader, payload: bytearray
    ) -> Coroutine[Any, Any, None]:
        if self._trainer is None:
            raise PeerFault("a tensor before this peer takes part", sender)
        self._courier.heard(sender)
        return self._trainer.frame(sender, header, payload)

    def _on_fault(self, sender: str, fault: PeerFault) -> None:
        log.warning("disconnected %s: %s", sender, fault.cause)
        if self._trainer is not None:
            self._trainer.stream_lost(sender)

    def _on_lost(self, peer_id: str, lane: str, error: Unreachable) -> None:
        log.debug("stream %s with %s: %s", lane, peer_id, error.cause)
        self._liveness.stream_reset(peer_id, time.monotonic_ns())

    def _open_blob(self, digest: str) -> Path | None:
        if self._run is not None and (path := self._run.blobs.path(digest)) is not None:
            return path
        if self._trainer is not None and (path := self._offers.path(digest)) is not None:
            return path
        return self._checkpoints.path_of(digest) if self._checkpoints is not None else None

    # the end ------------------------------------------------------------------------------------

    async def _until_end(self) -> int:
        assert self._failed is not None and self._trainer is not None
        waits = {
            "failed": asyncio.ensure_future(self._failed),
            "lost": asyncio.create_task(self._host.lost.wait()),
            "left": asyncio.create_task(self._left.wait()),
            "leaving": asyncio.create_task(self._leaving.wait()),
            "done": asyncio.create_task(self._run_ended()),
        }
        try:
            while True:
                pending = [task for task in waits.values() if not task.done()]
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if waits["lost"].done():  # first, for it makes everything else fail
                    raise UserError(
                        "the libp2p daemon of this peer has ended by itself",
                        "start p2p-dtfm again; it takes up where the swarm is",
                        exit_code=1,
                    )
                if waits["failed"].done():
                    raise explained(waits["failed"].exception())
                if waits["left"].done():
                    return await self._end_left()
                if waits["done"].done() or (
                    waits["leaving"].done() and self._trainer.done.is_set()
                ):
                    return 0
                if waits["leaving"].done():
                    self._leave_now_or_ask()
        finally:
            for task in waits.values():
                task.cancel()

    def _leave_now_or_ask(self) -> None:
        """Leave at once where nobody depends on this peer; else ask for a view without it."""
        assert self._agreement is not None
        view = self._agreement.view
        if view is None or len(view.members) == 1:
            assert self._trainer is not None
            self._trainer.leave_views()
            self._left.set()
            return
        self._set_record(Intent.LEAVING)
        now_ns = time.monotonic_ns()
        self._do(self._agreement.request_replan(f"{self._me.peer_id} leaves", now_ns))

    async def _end_left(self) -> int:
        """Nothing depends on this peer any more: save what it holds, give what was asked for."""
        assert self._trainer is not None and self._checkpoints is not None
        trainer = self._trainer
        await trainer.settled()
        versions = {state.version for state in trainer.states.values()}
        if len(versions) == 1 and (step := versions.pop()) > 0:
            await self._checkpoints.save(step, dict(trainer.states), self.lineage_at(step))
        await trainer.hand_over()
        log.info("left the swarm")
        self.status.say(State.STOPPED, "left")
        return 0

    async def _run_ended(self) -> None:
        """After the last step: see that everyone has the whole model; then end if so set."""
        assert self._run is not None and self._checkpoints is not None
        assert self._agreement is not None and self._trainer is not None
        await self._trainer.done.wait()
        assert self._agreement.view is not None
        others = set(self._agreement.view.member_ids) - {self._me.peer_id}
        step = self._run.spec.total_steps
        end_s = time.monotonic() + DONE_WAIT_S
        while not self._checkpoints.whole_at(step, others) and time.monotonic() < end_s:
            await asyncio.sleep(TICK_S)
        if not self.settings.exit_when_done:
            await self._leaving.wait()

    async def _ask_to_pause(self) -> dict[str, Any]:
        self.pause("its user asked for it; p2p-dtfm resume ends it")
        return {"state": "leaving"}

    async def _ask_to_leave(self) -> dict[str, Any]:
        self.pause_reason = None
        self._begin_to_leave()
        return {"state": "leaving"}

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_exception(task.exception() or RuntimeError("unknown"))

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    # reading ------------------------------------------------------------------------------------

    def status_json(self) -> dict[str, Any]:
        """What `p2p-dtfm status --json` prints."""
        view = self._agreement.view if self._agreement else None
        return {
            "version": __version__,
            "dashboard": self._dashboard.address,
            "peer_id": self._me.peer_id,
            "life": self._life,
            "shaped_links": self._host.shaper.label if self._host.shaper else None,
            "emulated_device": emulated_flops_per_s(self.settings.device) is not None,
            "run": self._run.spec.name if self._run else None,
            "run_digest": self._run.digest if self._run else None,
            "data": self._run.manifest.notes.describe() if self._run else None,
            **self.status.as_json(),
            "view": view.id.number if view else None,
            "snapshot": view.id.snapshot if view else None,
            "plan": view.plan.digest() if view else None,
            "members": list(view.member_ids) if view else [],
            "layers": sorted(self._trainer.states) if self._trainer else [],
            "whole_checkpoint_step": self._checkpoints.whole_step if self._checkpoints else None,
            "checkpoints": str(self.home.checkpoints(self._run.digest)) if self._run else None,
        }

    def plan_json(self) -> dict[str, Any]:
        """The snapshot and plan in force, as plain data."""
        view = self._agreement.view if self._agreement else None
        if view is None:
            return {"view": None}
        return {
            "view": view.id.number,
            "snapshot": msgspec.to_builtins(view.snapshot),
            "snapshot_digest": view.id.snapshot,
            "plan": msgspec.to_builtins(view.plan),
            "plan_digest": view.plan.digest(),
        }

    def peers_json(self) -> list[dict[str, Any]]:
        view = self._agreement.view if self._agreement else None
        records = view.snapshot.records if view else ()
        now_s = time.monotonic()
        heard = self._courier.heard_s
        return [
            {
                **msgspec.to_builtins(record),
                "heard_s_ago": round(now_s - heard[record.peer_id], 1)
                if record.peer_id in heard
                else None,
                "layers": list(view.layers_of(record.peer_id)) if view else [],
            }
            for record in records
        ]

    async def _trace_json(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """The newest steps of all stage-holders by one clock; `steps` says how many."""
        view = self._agreement.view if self._agreement else None
        if view is None or not isinstance(view.plan, Plan):
            return {"peers": [], "missing": []}
        count = parameters.get("steps", "1")
        count = min(max(int(count), 1), STEPS_LIMIT) if count.isdecimal() else 1
        newest = self._recorder.newest
        first = None if newest is None else max(0, newest - count + 1)
        traces, missing = await self._traces.collect(view.plan.stage_holders(), first, count)
        return {"peers": peer_traces_json(view.plan, traces), "missing": missing}

    def history_json(self) -> dict[str, Any]:
        """Views, losses and held-out losses so far."""
        trainer = self._trainer
        return {
            "views": self.views,
            "losses": list(trainer.losses) if trainer else [],
            "held_out_losses": list(trainer.held_out) if trainer else [],
        }


def laboratory_marks(settings: Settings, host: Host) -> tuple[str, ...]:
    """What makes a daemon's figures those of a laboratory."""
    marks = []
    if host.shaper is not None:
        marks.append(f"shaped links: {host.shaper.label}")
    if emulated_flops_per_s(settings.device) is not None:
        marks.append("emulated device: it computes nothing, so losses mean nothing")
    return tuple(marks)


def bytes_per_s(mbps: float) -> int:
    """Of a rate in Mbit/s; 0 stays 0, no limit."""
    return int(mbps * 125_000)


def damaged_data(blob: Path) -> UserError:
    """A founder's own data are not what their manifest says."""
    return UserError(
        f"the data shard {blob} is damaged: its bytes are not those that were prepared",
        f"remove {blob.parents[1]} and make the data anew; "
        "for your own text: p2p-dtfm prepare PATH... --out DIR",
    )


def explained(error: BaseException | None) -> BaseException:
    """What ended this daemon; other peers that are gone are no bug of it."""
    assert error is not None
    leaves = list(_leaves(error))
    if not all(isinstance(leaf, Unreachable | Refused) for leaf in leaves):
        return error
    causes = "; ".join(dict.fromkeys(str(leaf) for leaf in leaves))
    return UserError(
        f"a peer that this one works with is gone: {causes}",
        (
            "start p2p-dtfm again with --initial-peers and the address of a peer that still runs",
            "if none does, start the founder again: it goes on from its newest whole checkpoint",
        ),
        exit_code=6,
    )


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def links_are_measured(records: tuple[PeerRecord, ...]) -> bool:
    """Whether one end at least of each pair has measured the link between them."""
    return all(
        right.peer_id in left.links or left.peer_id in right.links
        for left, right in itertools.combinations(records, 2)
    )
