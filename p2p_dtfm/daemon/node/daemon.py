"""The daemon: joins core, net and train. Its life is here, the rest in its parts, from below:

local            what it has of its own before it meets anybody
network          its place in the network, before any run is known
acquaintances    whom its home has met, and finding them again
join             founding and joining a run, measuring
membership       its part in the agreement on views
participation    the trainer, and what it asks for
coming_and_going being let into views, leaving them
effects          what the agreement asks of a member that trains
dispatch         what arrives
background       heartbeats, presence, measurements, data
status_api       what it tells those who ask on this machine

Four of these are rooms: join, participation, coming_and_going and background.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.dashboard.observer import Observer
from p2p_dtfm.daemon.dashboard.seen import Seen
from p2p_dtfm.daemon.machine.before_start import check_before_start
from p2p_dtfm.daemon.machine.locks import only_daemon_on
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.machine.world import World
from p2p_dtfm.daemon.node.acquaintances import Acquaintances
from p2p_dtfm.daemon.node.background.background import Background
from p2p_dtfm.daemon.node.coming_and_going.departure import Departure
from p2p_dtfm.daemon.node.coming_and_going.entry import Entry
from p2p_dtfm.daemon.node.dispatch import Dispatch
from p2p_dtfm.daemon.node.effects import Effects
from p2p_dtfm.daemon.node.join.measuring import measure
from p2p_dtfm.daemon.node.join.run_joining import RunJoining
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.node.membership import Membership
from p2p_dtfm.daemon.node.network import Network, p2pd_has_ended
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.node.status_api import StatusApi
from p2p_dtfm.daemon.peers.reachability import own_addresses
from p2p_dtfm.daemon.peers.recall import Past, recall
from p2p_dtfm.daemon.telemetry.event_files import EventFiles
from p2p_dtfm.net.errors import P2PD_HAS_ENDED, Refused, Unreachable
from p2p_dtfm.train.stage.device.failures import fault_of_device
from p2p_dtfm.train.stage.emulated import emulated_flops_per_s
from p2p_dtfm.train.stage.measure import exclusive_name, select_device

log = logging.getLogger("p2p_dtfm")


class Daemon:
    """One peer. `run` lives until the run is done and it may exit, or it is asked to leave."""

    def __init__(
        self,
        settings: Settings,
        dashboard: DashboardHost,
        seen: Seen | None = None,
        world: World | None = None,
    ) -> None:
        """`dashboard` is closed by its maker. `seen`: what an earlier daemon of this home has seen.
        `world`: this machine, unless another is given."""
        self._local = Local(settings, dashboard, seen, world)
        self.status_api: StatusApi | None = None
        self._departure: Departure | None = None
        """Set once this daemon takes part."""
        self.has_begun = False
        """All that it takes part with is there, and others may count on it."""

    async def run(self, past: Past | None = None) -> int:
        """Returns the exit code. Raises `UserError`. `past`: what its home remembers, if that was
        read."""
        local, settings, life = self._local, self._local.settings, self._local.life
        check_before_start(settings, past.without_data(settings) if past is not None else ())
        local.dashboard.check_ports(settings.dashboard, settings.public_status)
        _refuse_emulation_among_strangers(settings)
        local.home.acquire()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(local.home.release)
            local.observer.begin()
            stack.callback(local.observer.close)
            local.world.note_typed(local.home.root, settings)
            stack.push_async_callback(local.compute.end)
            if past is None:
                past = await asyncio.to_thread(recall, settings)
            life.handle_signals(until_stdin_closes=settings.until_stdin_closes)
            life.spawn(local.waits.keep_looking())
            stack.callback(life.cancel_tasks)
            try:
                departure = await life.unless_leaving(self._start(stack, past))
            except Exception as error:
                if (told := cause_of_end(error)) is error:
                    raise
                raise told from error
            if departure is None:
                log.info("left before it took part")
                return 0
            self.has_begun = True
            return await _until_end(departure)

    async def _start(self, stack: contextlib.AsyncExitStack, past: Past) -> Departure:
        local, settings = self._local, self._local.settings
        life = local.home.next_life()
        stack.enter_context(only_daemon_on(exclusive_name(select_device(settings.device))))
        if settings.tensorboard is not None:
            local.event_files = EventFiles(settings.tensorboard)
            stack.callback(local.event_files.close)
        network = await Network.start(local, life, past, stack)
        self.status_api = StatusApi(local, network)
        await self.status_api.start(stack)
        acquaintances = await Acquaintances.start(local, network, past)
        stack.push_async_callback(acquaintances.close)
        joining = RunJoining(local, network, acquaintances)
        run = await joining.enter_run()
        if run.spec.admission.is_invited:
            network.let_in_by_invitation(run.spec, local.home.run_directory(run.digest))
            acquaintances.seal_directory()
        membership = Membership(local, network, acquaintances, run, joining)
        participant = await Participant.start(membership, stack)
        stack.callback(local.life.cancel_tasks)
        departure, entry = Departure(participant), Entry(participant)
        Effects(participant, entry, departure)
        network.inside = Dispatch(participant)
        self._departure, self.status_api.participant = departure, participant
        await acquaintances.begin_to_remember(run)
        stack.callback(acquaintances.be_silent)
        membership.self_record = await measure(local, network, run)
        membership.set_record()
        if membership.founds:
            await _print_invitation(participant)
        await participant.resume_from_checkpoint()
        local.world.share_the_interpreter()
        Background(participant, departure).begin()
        local.life.spawn(entry.found() if membership.founds else entry.join())
        return departure

    # for whoever runs it -------------------------------------------------------------------------

    @property
    def observer(self) -> Observer:
        return self._local.observer

    @property
    def pause_reason(self) -> str | None:
        """Why this peer left, if it is to come back."""
        return self._local.life.pause_reason

    @property
    def pause_until_s(self) -> float | None:
        """When this peer is to come back by itself, by the wall clock."""
        return self._local.life.pause_until_s

    @property
    def is_to_leave(self) -> bool:
        """Whether this daemon was told to leave for good, and not for a pause."""
        return self._local.life.leaving.is_set() and self.pause_reason is None

    def pause(self, reason: str, until_s: float | None = None) -> None:
        """Leave like any peer, but to come back: `run` ends with `pause_reason` set."""
        self._local.life.pause(reason, until_s)

    def resume(self) -> bool:
        """Come back as soon as this peer has left, if it still leaves for a pause. Returns whether
        it does."""
        return self._local.life.resume()

    def come_as_founder(self) -> None:
        """Come as a founder, even without the run's file: the user once brought along the run to
        which this daemon comes back."""
        self._local.founds = True

    def leave(self) -> None:
        """Leave for good, even if a pause has begun."""
        self._local.life.leave()

    @property
    def run_digest(self) -> str:
        """The digest of the run that this daemon took part in, or empty."""
        departure = self._departure
        return departure.participant.membership.run.digest if departure is not None else ""

    def acquaintances(self) -> tuple[str, ...]:
        """Addresses of the other members of the last view, for coming back."""
        if self._departure is None or not self._departure.participant.views:
            return ()
        participant = self._departure.participant
        where = participant.network.messenger.where
        return tuple(at for peer_id in participant.views[-1]["members"] for at in where(peer_id))

    def let_go_of_home(self) -> None:
        """Free the home, as the operating system does for a process that was killed."""
        self._local.home.let_go()

    def status_json(self) -> dict[str, Any]:
        """What `p2p-dtfm status --json` prints; empty before there is a network."""
        return self.status_api.status_json() if self.status_api is not None else {}


def _refuse_emulation_among_strangers(settings: Settings) -> None:
    """Refuse an emulated device outside of a scenario: what it sends would undo the training of
    everybody else. Raises `UserError`."""
    if emulated_flops_per_s(settings.device) is not None and settings.shape is None:
        raise UserError(
            f"device {settings.device!r}: an emulated device computes nothing, so it may "
            "only be part of a scenario's swarm",
            ("use --device auto", "or: p2p-dtfm demo --scenario NAME"),
        )


async def _print_invitation(participant: Participant) -> None:
    run = participant.membership.run
    addresses = await own_addresses(participant.network.host)
    comes_back = participant.membership.acquaintances.comes_back
    what = "takes up" if comes_back or participant.checkpoints.saved else "founded"
    log.info("%s run %s (%s)", what, run.digest[:16], run.spec.name)
    if run.spec.admission.is_invited:
        lines = ["others join by invitation: p2p-dtfm invite prints a line for them"]
    else:
        lines = ["others join with one of these lines:"]
        lines += [f"  p2p-dtfm --initial-peers {address}" for address in addresses]
        lines += [
            f"  p2p-dtfm --initial-peers {address} --run-digest {run.digest}"
            for address in participant.local.settings.initial_peers
        ]
    with contextlib.suppress(OSError):  # its terminal may be closed by now
        print("\n".join(["", *lines]), flush=True)


async def _until_end(departure: Departure) -> int:
    """Returns the exit code. Raises what has ended this daemon."""
    participant = departure.participant
    life = participant.local.life
    waits: dict[str, asyncio.Task[Any]] = {
        "failed": asyncio.create_task(life.failed.wait()),
        "lost": asyncio.create_task(participant.network.host.lost.wait()),
        "left": asyncio.create_task(life.left.wait()),
        "leaving": asyncio.create_task(life.leaving.wait()),
        "done": asyncio.create_task(departure.run_ended()),
    }
    try:
        while True:
            pending = [task for task in waits.values() if not task.done()]
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if waits["lost"].done():  # first, because it makes all else fail
                await departure.save_alone()
                raise p2pd_has_ended()
            if life.error is not None:
                raise cause_of_end(life.error)
            if waits["left"].done():
                await departure.end()
                return 0
            if waits["done"].done():
                waits["done"].result()  # raises what failed after the last step
                return 0 if await departure.keep_the_model() else 2  # as of any full disk
            if waits["leaving"].done() and participant.trainer.done.is_set():
                await departure.keep_the_model()
                return 0
            if waits["leaving"].done():
                departure.leave_now_or_ask()
    finally:
        for task in waits.values():
            task.cancel()


def cause_of_end(error: BaseException) -> BaseException:
    """What ended this daemon. Other peers that are gone, or a device, are no bug of it."""
    leaves = list(_leaves(error))
    own = [leaf for leaf in leaves if not isinstance(leaf, Unreachable | Refused)]
    if own:
        if (fault := fault_of_device(own)) is None:
            return error
        log.warning("what PyTorch says of it: %s", own[0])
        return fault
    if any(P2PD_HAS_ENDED in str(leaf) for leaf in leaves):
        return p2pd_has_ended()
    causes = "; ".join(dict.fromkeys(str(leaf) for leaf in leaves))
    return UserError(
        f"a peer that this one works with is gone: {causes}",
        (
            "start p2p-dtfm again: it finds whom it has met; or name one that still runs, with "
            "--initial-peers and its address, in a run by invitation with --invite and its line",
            "if none does, start the founder again: it goes on from its newest whole checkpoint",
        ),
        exit_code=UNREACHABLE,
    )


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
