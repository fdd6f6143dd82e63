"""The daemon: joins core, net and train. Its life is here, the rest in its parts.

peer_state      what it knows of itself
acquaintances   whom its home has met, and finding them again
join            founding and joining a run, measuring
membership      views: being let in, the actions of the agreement, leaving
trainer_outlet  what the trainer asks for
dispatch        what arrives
background      heartbeats, presence, measurements, data
status_api      what it tells those who ask on this machine
"""

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.consensus.actions import LAN, WAN
from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.daemon.machine.device_lock import only_daemon_on
from p2p_dtfm.daemon.machine.disk import keep_under
from p2p_dtfm.daemon.machine.resident_limit import memory_bytes
from p2p_dtfm.daemon.machine.view_history import ViewHistory
from p2p_dtfm.daemon.node.background import Background
from p2p_dtfm.daemon.node.before_start import check_before_start
from p2p_dtfm.daemon.node.join import Joining
from p2p_dtfm.daemon.node.membership import TICK_S
from p2p_dtfm.daemon.node.peer_state import bytes_per_s
from p2p_dtfm.daemon.node.status_api import StatusApi, laboratory_marks
from p2p_dtfm.daemon.peers.gate import GateKeeper
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.reachability import ReachabilityService
from p2p_dtfm.daemon.peers.run_source import Run
from p2p_dtfm.daemon.state_transfer.checkpoints import Checkpoints
from p2p_dtfm.daemon.state_transfer.donor import Donor
from p2p_dtfm.daemon.state_transfer.initial_states import InitialStates
from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.daemon.telemetry.event_files import EventFiles
from p2p_dtfm.daemon.telemetry.event_log import EventLog
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.telemetry.trace_collector import TraceCollector
from p2p_dtfm.daemon.trainer.step_watch import StepWatch
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.daemon.trainer.trainer_state import Tools
from p2p_dtfm.net.contacts.addresses import parse_address
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.shaping import LineLimit, Shape, Shaper
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.frames import FrameLimits
from p2p_dtfm.net.streams.probing import Probes
from p2p_dtfm.train.data import Dataset
from p2p_dtfm.train.stage.batches import Batches
from p2p_dtfm.train.stage.emulated import emulated_flops_per_s
from p2p_dtfm.train.stage.measure import exclusive_name, select_device
from p2p_dtfm.web.api import LocalApi, make_app

log = logging.getLogger("p2p_dtfm")

IN_FLIGHT_PART = 8  # of the memory offered here; in tensors that others have announced
DONE_WAIT_S = 60.0
ORPHAN_GRACE_S = 15.0
"""A daemon whose parent has died hands its layers over within this time, or ends without."""
SWITCH_INTERVAL_S = 0.0005


class Daemon(Background, Joining, StatusApi):
    """One peer. `run` lives until the run is done and it may exit, or it is asked to leave."""

    async def run(self) -> int:
        """Returns the exit code. Raises `UserError`."""
        check_before_start(self.settings)
        self._refuse_emulation_among_strangers()
        self.home.acquire()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.home.release)
            stack.callback(self.observer.close)
            stack.callback(self.compute.close)
            self._failed = asyncio.get_running_loop().create_future()
            await self._recall()
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
        if self.settings.tensorboard is not None:
            self._event_files = EventFiles(self.settings.tensorboard)
            stack.callback(self._event_files.close)
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

    def acquaintances(self) -> tuple[str, ...]:
        """Where the other members of the last view are, for coming back."""
        members = self.views[-1]["members"] if self.views else []
        return tuple(address for peer_id in members for address in self._messenger.where(peer_id))

    async def _start_network(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self.settings
        self.status.say(State.STARTING, "starts libp2p")
        self._host = await Host.start(self.home.identity, settings.listen, settings.announce)
        stack.push_async_callback(self._host.close)
        self._first_contacts = await self._reach_first_contacts()
        self._keeper = GateKeeper.of(self._host)
        self.observer.guarded_by(self._keeper.refused_most)
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
        self._control = ControlPlane(self._host, self._serve)
        self._reachability = ReachabilityService(self._host, settings.relay)
        self._messenger = Messenger(
            self._host,
            self._control,
            self._life,
            self._on_heard,
            self._on_call_failed,
            self._reachability.straighten,
        )
        await self._control.ready()  # from now on others are answered
        stack.push_async_callback(self._control.close)
        await self._reachability.ready()
        stack.push_async_callback(self._reachability.close)
        self.status.say(State.STARTING, "asks whether others can reach this machine")
        await self._reachability.find(self._first_contacts)
        self._spawn(self._reachability.keep())
        stack.push_async_callback(self._messenger.close)
        self._traces = TraceCollector(self._recorder, self._messenger, self._host)
        self.observer.meets(self._messenger)
        self.observer.marks = laboratory_marks(settings, self._host)
        await self._start_api(stack)
        for address in self._first_contacts:
            peer_id, where = parse_address(address)
            self._messenger.learn(peer_id, (where,))
        self._directory = await self._start_directory(not self._reachability.is_behind_router)
        stack.push_async_callback(self._directory.close)
        self._begin_to_search()
        self._probes = await Probes(self._host).ready()
        self._blobs = await BlobExchange(
            self._host, self._open_blob, self._on_fault, self._on_download, self._may_have
        ).ready()

    async def _start_run(self, stack: contextlib.AsyncExitStack) -> None:
        self._run = run = await self._enter_run()
        self._messenger.run_digest = run.digest
        self._data_digests = frozenset(run.manifest.blobs())
        self._workload = workload_of(run.spec)
        self._events = EventLog(
            self.home.run_directory(run.digest) / "events.jsonl", self.status.troubles
        )
        limits = FrameLimits(payload_bytes=max(64 << 20, self._workload.boundary_bytes))
        self._bulk = BulkPlane(
            self._host,
            run.digest,
            limits,
            self._on_frame,
            self._on_fault,
            self._on_lost,
            on_undelivered=self._on_undelivered,
            admit_frame=self._admit_frame,
            in_flight_bytes=memory_bytes(self.settings) // IN_FLIGHT_PART,
        )
        await self._bulk.ready()
        stack.push_async_callback(self._bulk.close)
        self._view_history = ViewHistory(self.home.root, run.digest)
        self._agreement = Agreement(
            self._me,
            run.digest,
            self._workload,
            self._host.identity.sign,
            verify,
            LAN if self.settings.is_near else WAN,
            self._view_history.read(),
        )
        self._agreement.terms = terms_of(run.spec)
        self._tell_whom_it_follows(self._agreement)
        self._keeper.attach(self._agreement, run.spec.admission.mode == "open")
        self.observer.trains(run.spec, run.digest, self._workload, self._agreement)
        self._make_trainer(run)
        assert self._trainer is not None and self._checkpoints is not None
        stack.push_async_callback(self._trainer.close)
        stack.push_async_callback(self._checkpoints.close)
        stack.callback(self._cancel_tasks)
        await self._begin_to_remember(run)
        if self._nearby is not None:
            stack.callback(self._nearby.close)

    async def _start_api(self, stack: contextlib.AsyncExitStack) -> None:
        readers = {
            "status": self.status_json,
            "plan": self.plan_json,
            "peers": self.peers_json,
            "history": self.history_json,
            "dashboard": self._dashboard.invitation,
        }
        actions = {"pause": self._ask_to_pause, "leave": self._ask_to_leave}
        self._dashboard.show(self.observer.state, actions)
        await self._dashboard.start(self.settings.dashboard, self.home.root)
        questions = {"trace": self._trace_json}
        self._api = LocalApi(make_app(readers, actions, questions), self.home.socket)
        await self._api.start()
        stack.push_async_callback(self._api.close)
        if self._dashboard.address is not None:
            log.info("dashboard %s", self._dashboard.address)

    def _make_trainer(self, run: Run) -> None:
        directory = self.home.run_directory(run.digest)
        shutil.rmtree(directory / "offers", ignore_errors=True)  # of a process that was killed
        for leftover in run.blobs.root.glob(".*"):
            leftover.unlink(missing_ok=True)
        self._offers = Offers(directory / "offers")
        self._checkpoints = Checkpoints(
            self.home.checkpoints(run.digest),
            run.spec,
            self._blobs,
            self.compute,
            self._announce,
            self._has_stage,
            self.status.troubles,
        )
        dataset = Dataset(run.manifest, run.blobs.path, run.spec.model.context)
        tools = Tools(
            me=self._me.peer_id,
            spec=run.spec,
            batches=Batches(dataset, run.spec),
            messenger=self._messenger,
            bulk=self._bulk,
            blobs=self._blobs,
            compute=self.compute,
            checkpoints=self._checkpoints,
            donor=Donor(self._messenger, self._bulk, self.compute, self._offers),
            initial=InitialStates(
                run.spec,
                run.blobs,
                self._blobs,
                self.compute,
                self.status,
                lambda: [peer for peer in self._messenger.known if peer != self._me.peer_id],
            ),
            status=self.status,
            sign=self._host.identity.sign,
            recorder=self._recorder,
        )
        self._trainer = Trainer(tools, self)
        self._step_watch = StepWatch(
            self._me.peer_id,
            run.spec,
            max(run.manifest.blobs().values(), default=0),
            self._trainer.waits,
            self._liveness.sleep_ns,
        )
        self._trainer.history.on_record = self._on_step
        self.observer.measures_with(lambda: self._measured_rate() > 0)

    async def _take_part(self) -> None:
        assert self._run is not None and self._trainer is not None
        await self._resume_from_checkpoint()
        _share_the_interpreter()
        self._spawn(self._tick_loop())
        self._spawn(self._reachability_loop())
        self._spawn(self._presence_loop())
        self._spawn(self._memory_loop())
        if self._founds:
            self._spawn(self._reunion_loop())
        if self._disk_limit_bytes:
            directory = self.home.run_directory(self._run.digest)
            self._spawn(keep_under(self.home.root, directory, self._disk_limit_bytes))
        self._spawn(self._record_loop())
        self._spawn(self._data_loop())
        self._spawn(self._timeline_loop())
        self._training = self._spawn(self._trainer.run())
        self._spawn(self._found_loop() if self._founds else self._join_loop())

    async def _until_end(self) -> int:
        assert self._failed is not None and self._trainer is not None
        waits: dict[str, asyncio.Future[Any]] = {
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

    async def _end_left(self) -> int:
        """Nothing depends on this peer any more: save what it holds, give what was asked for."""
        assert self._agreement is not None
        assert self._trainer is not None and self._checkpoints is not None
        trainer, view = self._trainer, self._agreement.view
        await trainer.settled()
        step = max((state.version for state in trainer.states.values()), default=0)
        newest = {n: state for n, state in trainer.states.items() if state.version == step}
        if step > 0:  # what it guarded for others may be a step behind
            await self._checkpoints.save(step, newest, self.lineage_at(step))
        if view is None or view.members:  # else all leave, and nobody asks for anything
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


def _share_the_interpreter() -> None:
    """Event loop and compute thread hold each other up as little as they can.

    Some 200,000 objects that imports have left stay for good: each full collection that looks
    through them holds up both for 0.1 to 0.3 s. And a thread that wants the interpreter gets it
    from one that does not let go after this interval, by default 5 ms.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


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
