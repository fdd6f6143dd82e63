"""A swarm of real daemons in virtual time, and what may be done to them.

`play(seed, scene)` makes a world and lets `scene(swarm)` act in it. The daemons are those that
`p2p-dtfm` runs, with homes of their own in a real directory. The network, the directory, time and
chance are the world's.
"""

import asyncio
import contextlib
import gc
import inspect
import io
import logging
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.dashboard.observer import Observer
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.daemon import Daemon
from p2p_dtfm.daemon.node.status_api import StatusApi
from p2p_dtfm.net.contacts.identity import Identity, identity_of_seed
from p2p_dtfm.testbed.virtual.disk import VirtualDisk
from p2p_dtfm.testbed.virtual.loop import VirtualLoop
from p2p_dtfm.testbed.virtual.peer import Ending, Peer
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.routers.meeting_point import NAME, MeetingPoint
from p2p_dtfm.testbed.virtual.turns import VirtualTask
from p2p_dtfm.testbed.virtual.wires.network import VirtualNetwork
from p2p_dtfm.testbed.virtual.worlds import VirtualResident, WorldOf
from p2p_dtfm.train.stage.timed import use_one_thread

Result = TypeVar("Result")
HOURS = "06-22"
LOOK_S = 0.05
MEMORY_GIB = 1.0
FLOPS_PER_S = (20_000_000, 80_000_000)
"""A device's speed is drawn from this range."""
SLOWER = 10
ENDINGS_LIMIT = 64
"""How many times a coroutine that is closed may wait for something else before it ends."""


class Swarm:
    """All peers of a world, and what may be done to them."""

    def __init__(self, loop: VirtualLoop, seed: int, folder: Path) -> None:
        self.loop = loop
        self.folder = folder
        self.draws = random.Random(f"swarm {seed}")
        self.network = VirtualNetwork(loop, random.Random(f"links {seed}"))
        self.trace = self.network.links.trace
        self.peers: list[Peer] = []
        self.memory_gib = MEMORY_GIB
        """The memory of each machine."""
        self.are_equal = False
        """All machines are as fast as the fastest, so in all plans each has the whole model."""
        self.are_slow = False
        """Machines compute a step in some seconds."""
        self.stays_resident = False
        """A daemon that its owner pauses stays, and comes back in the same process."""
        self.meeting_point: MeetingPoint | None = None
        """Where daemons that nobody can call meet."""
        self.plans: dict[bytes, Plan | NoPlan] = {}
        """Computed plans, by their snapshot's bytes."""
        self.taken = Counter[str]()
        """Tokens that each peer has taken through one layer."""
        self._seed = seed
        self._graves: list[VirtualTask] = []
        """Tasks of killed processes. Were one let go of, Python would run its `finally`."""

    # peers ---------------------------------------------------------------------------------------

    def peer(self, name: str, **settings: object) -> Peer:
        """A home with an identity; `start` lets a daemon run in it."""
        home = self.folder / name
        home.mkdir(parents=True)
        identity = self.identity_of(name)
        (home / "identity.key").write_bytes(identity.to_bytes())
        values: dict[str, object] = {
            "home": home,
            "nearby": False,
            "dashboard": "off",
            "samples": False,
            "listen": ("/ip4/127.0.0.1/tcp/0",),
            "device": "cpu",
            "threads": 1,
            "memory_gib": self.memory_gib,
            "exit_when_done": True,
        }
        made = Settings.model_validate(values | settings)
        flops_per_s = random.Random(f"{self._seed} {name}").randrange(*FLOPS_PER_S)
        if self.are_equal:
            flops_per_s = FLOPS_PER_S[1]
        if self.are_slow:
            flops_per_s //= SLOWER
        disk = VirtualDisk(self.loop)
        peer = Peer(name, home, made, identity.peer_id, flops_per_s, disk)
        self.peers.append(peer)
        return peer

    def identity_of(self, name: str) -> Identity:
        return identity_of_seed(bytes.fromhex(digest_bytes(f"{self._seed} {name}".encode())))

    def named(self, name: str) -> Peer:
        return next(peer for peer in self.peers if peer.name == name)

    def put_behind_routers(self, names: Sequence[str], chance: str, founder: str) -> None:
        """Called before any peer is made. If the founder is among `names`, all meet at a meeting
        point."""
        ids = [self.identity_of(name).peer_id for name in names]
        self.network.put_behind_routers(ids, chance)
        if founder in names:
            self.meeting_point = MeetingPoint(self.network, self.loop, self.identity_of(NAME))
            self.meeting_point.start()

    def address(self, peer: Peer) -> str:
        return f"{self.network.address_of(peer.peer_id)}/p2p/{peer.peer_id}"

    def start(self, peer: Peer, **changes: object) -> None:
        assert not peer.is_running, peer.name
        if peer.process is not None:
            peer.past.append(peer.process)
        if peer.ended is not None and peer.ended.done() and (error := peer.ended.exception()):
            peer.past_endings.append(Ending(error, peer.has_run, peer.was_in_a_view()))
        lives = len(peer.past)
        self.trace.note(self.loop.now_ns, "start", peer.name)
        draws = random.Random(f"{self._seed} {peer.name} {lives}")
        peer.process = Process(f"{peer.name}.{lives}", self.loop, draws, peer.disk)
        peer.process.wall_ahead_ns = peer.wall_ahead_ns
        peer.started_s, peer.is_told_to_leave = self.now_s, False
        settings = peer.settings.model_copy(update=changes)
        world = WorldOf(self, peer)
        if self.stays_resident:
            peer.resident = VirtualResident(settings, peer, world)
            peer.ended = peer.process.begin(peer.resident.run())
        else:
            peer.daemon = Daemon(settings, DashboardHost(), world=world)
            peer.ended = peer.process.begin(peer.daemon.run())

    def kill(self, peer: Peer) -> None:
        """As SIGKILL does: nothing of the process runs any more, and others' connections to it
        break."""
        assert peer.process is not None
        self.trace.note(self.loop.now_ns, "kill", peer.name)
        self._graves += [task for task in self.loop.tasks() if task.process is peer.process]
        peer.process.kill()  # which drops the turns that it has missed
        if peer.host is not None:
            self.network.leave(peer.host)
        for owner in (peer.daemon, peer.resident):  # a peer that just came back has no daemon yet
            if owner is not None:
                owner.let_go_of_home()
        peer.disk.process_was_killed()

    def cut_power(self, peer: Peer) -> None:
        """Kills the peer, and takes what its disk had not written down."""
        self.kill(peer)
        self.trace.note(self.loop.now_ns, "power", peer.name)
        peer.disk.power_was_cut(self.draws)

    def set_hours(self, peer: Peer, are_over: bool) -> None:
        """Ends or begins the owner's hours. A resident then pauses, or comes back."""
        self.trace.note(self.loop.now_ns, "hours", peer.name, are_over)
        peer.is_outside_hours = are_over

    def leave(self, peer: Peer, lasts_s: float | None = None) -> None:
        """Tells the daemon to leave, as the first signal does or an owner's pause, which may last
        `lasts_s`."""
        assert peer.daemon is not None and peer.process is not None
        self.trace.note(self.loop.now_ns, "leave", peer.name)
        peer.is_told_to_leave = peer.resident is None
        until_s = None if lasts_s is None else peer.process.wall_ns() / 1e9 + lasts_s
        peer.daemon.pause("its owner needs the machine", until_s)

    def ask(self, peer: Peer) -> None:
        """Asks for all that a daemon tells programs on its machine. Each answer must be plain
        data."""
        daemon, process = peer.daemon, peer.process
        if daemon is None or daemon.status_api is None or process is None:
            return

        def end(asking: asyncio.Task[None]) -> None:
            if not asking.cancelled() and (error := asking.exception()) is not None:
                process.failures.append(f"asked what it tells: {error!r}")

        process.begin(_ask_all(daemon.status_api, daemon.observer)).add_done_callback(end)

    def come_back(self, peer: Peer) -> None:
        """As `p2p-dtfm resume` does."""
        self.trace.note(self.loop.now_ns, "come back", peer.name)
        if peer.is_away:
            assert peer.resident is not None and peer.resident.decide is not None
            peer.resident.decide(True)
        else:
            assert peer.daemon is not None and peer.daemon.resume()

    def end(self, peer: Peer) -> None:
        """Ends the daemon as a signal does, and the resident with it."""
        peer.is_told_to_leave = True
        if peer.is_away:
            assert peer.resident is not None and peer.resident.decide is not None
            peer.resident.decide(False)
        elif peer.daemon is not None and peer.resident is not None:
            self.trace.note(self.loop.now_ns, "end", peer.name)
            peer.daemon.leave()
        else:
            self.leave(peer)

    def set_clock(self, peer: Peer, ahead_s: float) -> None:
        """Puts the machine's wall clock so far ahead of the world's time."""
        self.trace.note(self.loop.now_ns, "clock", peer.name, ahead_s)
        peer.wall_ahead_ns = int(ahead_s * 1e9)
        if peer.process is not None:
            peer.process.wall_ahead_ns = peer.wall_ahead_ns

    def pause(self, peer: Peer) -> None:
        """As SIGSTOP does."""
        assert peer.process is not None
        self.trace.note(self.loop.now_ns, "pause", peer.name)
        peer.process.pause()

    def resume(self, peer: Peer) -> None:
        assert peer.process is not None
        self.trace.note(self.loop.now_ns, "resume", peer.name)
        peer.process.resume()

    def fall_asleep(self, peer: Peer) -> None:
        """Puts the machine to sleep, as a closed lid does. The caller cuts its lines."""
        assert peer.process is not None
        self.trace.note(self.loop.now_ns, "asleep", peer.name)
        peer.process.fall_asleep()

    def wake(self, peer: Peer) -> None:
        assert peer.process is not None
        self.trace.note(self.loop.now_ns, "awake", peer.name)
        peer.process.wake()

    def cut(self, one: Peer, other: Peer, both_ways: bool = True) -> None:
        self.network.links.cut(one.peer_id, other.peer_id)
        if both_ways:
            self.network.links.cut(other.peer_id, one.peer_id)
        self.network.give_up_if_still_cut(one.peer_id, other.peer_id)

    def mend(self, one: Peer, other: Peer, both_ways: bool = True) -> None:
        for here, there in ((one, other), (other, one)) if both_ways else ((one, other),):
            if self.network.links.of(here.peer_id, there.peer_id).is_cut:
                self.network.find_out_what_was_given_up(here.peer_id, there.peer_id)
                self.network.links.mend(here.peer_id, there.peer_id)

    def forget(self) -> None:
        """Lets go of everything that ran."""
        for peer in self.peers:
            peer.daemon = peer.resident = peer.ended = peer.host = None
        self.network.hosts.clear()

    # waiting -------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self.loop.now_s

    async def until(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        """Waits for `condition`. Raises `NeverHappened`, which says how all peers stand."""
        end_s = self.now_s + limit_s
        while not condition():
            if self.now_s > end_s:
                raise NeverHappened(what, limit_s, self.peers)
            await asyncio.sleep(LOOK_S)


async def _ask_all(api: StatusApi, observer: Observer) -> None:
    told = [api.status_json(), api.plan_json(), api.peers_json(), api.history_json()]
    told += [await api.invite({}), await api.revoke({"who": "nobody"})]
    msgspec.json.encode([*told, observer.state(), await api.trace_json({"steps": "2"})])


class NeverHappened(AssertionError):
    """Something did not happen within its time."""

    def __init__(self, what: str, limit_s: float, peers: Sequence[Peer]) -> None:
        lines = []
        for peer in peers:
            lines += [f"  {peer.name}: {peer.standing()}", *peer.waits()]
        failures = [f"  {peer.name}: {text}" for peer in peers for text in peer.failures()]
        super().__init__("\n".join([f"not within {limit_s:g} s: {what}", *lines, *failures]))


def play(seed: int, folder: Path, scene: Callable[[Swarm], Awaitable[Result]]) -> Result:
    """Plays `scene` in a new world and returns its result. What the daemons print goes nowhere."""
    with _what_was_there_set_aside():
        return _play(seed, folder, scene)


def _play(seed: int, folder: Path, scene: Callable[[Swarm], Awaitable[Result]]) -> Result:
    loop = VirtualLoop()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    use_one_thread()
    swarm = Swarm(loop, seed, folder)

    async def run() -> Result:
        return await scene(swarm)

    asyncio.set_event_loop(loop)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return loop.run_until_complete(run())
    finally:
        asyncio.set_event_loop(None)
        _end_world(loop, swarm)


_SET_ASIDE_FOR_GOOD: list[bool] = []
"""Not empty once `set_aside_for_good` was called. To ask the collector how much is set aside would
take as long as to look through it all."""


def set_aside_for_good() -> None:
    """No collection in this process looks any more through the objects that exist by now."""
    gc.collect()
    gc.freeze()
    _SET_ASIDE_FOR_GOOD[:] = [True]


@contextlib.contextmanager
def _what_was_there_set_aside() -> Iterator[None]:
    """The collector looks through the world's objects alone. Through all that a process has loaded
    it takes half a second, during each world and at its end. Afterwards everything is left to it
    again, unless somebody has set things aside for good."""
    if _SET_ASIDE_FOR_GOOD:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _end_world(loop: VirtualLoop, swarm: Swarm) -> None:
    """Lets go of the homes' locks. Nothing that was under way goes on, not even to say so."""
    for peer in swarm.peers:
        if peer.process is not None and peer.daemon is not None:
            peer.process.kill()
            peer.daemon.let_go_of_home()
    tasks = asyncio.all_tasks(loop)
    loop.close()
    heard, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            assert isinstance(coroutine, Coroutine)
            _end(coroutine)
        swarm.forget()
        gc.collect()
    finally:
        sys.unraisablehook = heard


def _end(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Closes a coroutine, again and again if it waits for something while it ends. Else the
    collector would close it later, within whatever runs then."""
    for _ in range(ENDINGS_LIMIT):
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED:
            return
        with contextlib.suppress(BaseException):  # what it raises at its end concerns nobody
            coroutine.close()
