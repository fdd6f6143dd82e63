"""What a daemon knows of itself, and the tasks it has begun; its parts are built on this."""

import asyncio
import logging
from typing import Any

from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.liveness.liveness import LAN_LIVENESS, WAN_LIVENESS, Liveness
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.dashboard.observer import Observer
from p2p_dtfm.daemon.dashboard.seen import Seen
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.machine.view_history import ViewHistory
from p2p_dtfm.daemon.peers.gate import GateKeeper
from p2p_dtfm.daemon.peers.held_back import HeldBack
from p2p_dtfm.daemon.peers.home_memory import Memory
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.reachability import ReachabilityService
from p2p_dtfm.daemon.peers.run_source import Run
from p2p_dtfm.daemon.peers.self_record import SelfRecord
from p2p_dtfm.daemon.state_transfer.checkpoints import Checkpoints
from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.daemon.telemetry.device_pace import DevicePace
from p2p_dtfm.daemon.telemetry.event_files import EventFiles
from p2p_dtfm.daemon.telemetry.event_log import EventLog
from p2p_dtfm.daemon.telemetry.plan_times import PlanTimes
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.daemon.telemetry.step_recorder import StepRecorder
from p2p_dtfm.daemon.telemetry.trace_collector import TraceCollector
from p2p_dtfm.daemon.trainer.step_watch import StepWatch
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.net.contacts.nearby import Nearby
from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.probing import Probes
from p2p_dtfm.web.api import LocalApi

log = logging.getLogger("p2p_dtfm")

REPLAN_INTERVAL_S = 60.0
"""A peer asks for a new plan at most this often; others' requests count apart."""


class PeerState:
    """Attributes that start as None are there once the run is known.

    Each part of the daemon is a class on top of this one or of the part below it, in a file of its
    own; `daemon.node.daemon` puts them together.
    """

    _host: Host
    """From here on: there once the network has started."""
    _me: Member
    _control: ControlPlane
    _keeper: GateKeeper
    _messenger: Messenger
    _reachability: ReachabilityService
    _directory: Directory
    _traces: TraceCollector
    _probes: Probes
    _blobs: BlobExchange
    _api: LocalApi
    _workload: Workload
    """From here on: there once the run is known."""
    _events: EventLog
    _bulk: BulkPlane
    _offers: Offers
    _self_record: SelfRecord
    """There once this machine is measured."""

    def __init__(
        self, settings: Settings, dashboard: DashboardHost, seen: Seen | None = None
    ) -> None:
        """`dashboard` is closed by whoever made it. `seen`: by an earlier daemon of this home."""
        self.settings = settings
        self.status = Status()
        self.observer = Observer(self.status, seen)
        self._recorder = StepRecorder()
        self._dashboard = dashboard
        self._event_files: EventFiles | None = None
        self.home = Home(settings.home)
        self.compute = Compute()
        self.views: list[dict[str, Any]] = []
        self._life = 0
        self._signalled = False
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()
        self._leaves_without_plan_s: float | None = None
        self._failed: asyncio.Future[None] | None = None
        self._run: Run | None = None
        self._agreement: Agreement | None = None
        self._trainer: Trainer | None = None
        self._checkpoints: Checkpoints | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._liveness = Liveness(LAN_LIVENESS if settings.is_near else WAN_LIVENESS)
        self._step_watch: StepWatch | None = None
        self._plan_times = PlanTimes()
        self._device_pace = DevicePace()
        self._moved = asyncio.Event()
        """This peer's addresses are others than those in its presence."""
        self._far_ends: dict[str, str] = {}
        """Of each connected peer, the address of its end; empty on loopback."""
        self._troubled: set[str] = set()
        """Peers with whom a tensor was lost since the last commit."""
        self._held_back = HeldBack()
        self._waiting_too: tuple[str, ...] = ()
        """Other newcomers that wait with this one."""
        self._data_digests: frozenset[str] = frozenset()
        """Of the run's data shards and tokenizer."""
        self._learnt: dict[str, Signed] = {}
        self._training: asyncio.Task[Any] | None = None
        self._welcomed_by = ""
        self._members_named: tuple[str, ...] = ()
        """By the member that answered first."""
        self._first_contacts: tuple[str, ...] = ()
        """Addresses that were reached before anything else."""
        self._past: list[Memory] = []
        self._recalled: Memory | None = None
        self._memory: Memory | None = None
        self._memory_lock = asyncio.Lock()
        self._memory_fails = False
        self._nearby: Nearby | None = None
        self._view_history: ViewHistory | None = None
        self._asked_first = ""
        """Whose word has made this peer come back as a newcomer."""
        self._founds = settings.founds
        self._may_go_on_alone = settings.founds
        """Where nobody else is there."""
        self.pause_reason: str | None = None
        """Why this peer left, if it is to come back."""
        self._replanned_s = -REPLAN_INTERVAL_S

    def pause(self, reason: str) -> None:
        """Leave like any peer, but to come back: `run` ends with `pause_reason` set."""
        if not self._leaving.is_set():
            self.pause_reason = reason
            self._begin_to_leave()

    def _begin_to_leave(self) -> None:
        self.status.say(State.LEAVING, "finishes the step and hands its layers to the others")
        self._leaving.set()

    async def _ask_to_pause(self) -> dict[str, Any]:
        self.pause("its user asked for it; p2p-dtfm resume ends it")
        return {"state": "leaving"}

    async def _ask_to_leave(self) -> dict[str, Any]:
        self.pause_reason = None
        self._begin_to_leave()
        return {"state": "leaving"}

    def _set_record(self, intent: Intent | None = None) -> None:
        assert self._agreement is not None
        self._self_record.state_steps(self._plan_times.told())
        record, signed = self._self_record.make(self._host.identity.sign, intent)
        self._agreement.set_record(record, signed)

    def _members(self) -> set[str]:
        """Of the view in force, and of the one that is to follow it."""
        assert self._agreement is not None
        views = (self._agreement.view, self._agreement.next_view)
        return {peer_id for view in views if view is not None for peer_id in view.member_ids}

    def _has_stage(self) -> bool:
        view = self._agreement.view if self._agreement is not None else None
        return view is not None and bool(view.layers_of(self._me.peer_id))

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

    def _measured_rate(self) -> int:
        """Tokens a second of the view in force; 0 while too little of it was seen."""
        trainer = self._trainer
        if trainer is None or not trainer.history.pace.is_settled:
            return 0
        return int(self.status.figures().get("tokens_per_s") or 0)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    @property
    def run_digest(self) -> str:
        """Of the run that it took part in, or empty."""
        return self._run.digest if self._run is not None else ""


def bytes_per_s(mbps: float) -> int:
    """Of a rate in Mbit/s; 0 stays 0, no limit."""
    return int(mbps * 125_000)
