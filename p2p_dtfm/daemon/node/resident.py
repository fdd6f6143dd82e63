"""What stays on a machine between times of taking part: after a pause, and outside of set hours.

A pause is a planned leave, after which the process stays, holds its home and answers `status` and
`resume`. Neither the model nor torch and libp2p are in memory meanwhile: this module and what it
imports know nothing of them, and a process that has trained makes room for one that has not
(`daemon.machine.away`). To come back is to join like a newcomer, through the peers that were met
before. If they are gone, or there were none, the daemon begins as it was first started.
"""

import asyncio
import importlib
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from p2p_dtfm import __version__
from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.dashboard.seen import Seen
from p2p_dtfm.daemon.machine.away import AFRESH, Away, StepAside, as_plain, is_replaced
from p2p_dtfm.daemon.machine.devices.together import for_all_devices
from p2p_dtfm.daemon.machine.home import Home, fault_of_disk, unexplained
from p2p_dtfm.daemon.machine.hours import Hours
from p2p_dtfm.daemon.machine.life import is_a_service, kept_up, listen_for_the_end
from p2p_dtfm.daemon.machine.owner.yields import REASONS, yields_of
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.returning import (
    IN_VAIN,
    TRY_AGAIN_S,
    acquire,
    away_s,
    in_vain,
    once_home_may_be_used,
    problems_while_away,
    release_memory,
    shown_while_away,
    to_come_back,
)
from p2p_dtfm.daemon.node.time_away import TimeAway
from p2p_dtfm.daemon.telemetry.attention.attention import Attention
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.ports import now
from p2p_dtfm.ports.ctrl_c import ends_at_once
from p2p_dtfm.ports.packages import of_an_import
from p2p_dtfm.web.api import LocalApi, make_app, refusal_answer
from p2p_dtfm.web.state import DashboardState, Event, Timeline, ViewState

if TYPE_CHECKING:
    from p2p_dtfm.daemon.node.daemon import Daemon
    from p2p_dtfm.daemon.peers.recall import Past

Result = TypeVar("Result")
LOOK_EVERY_S = 1.0
_TRAINS = "p2p_dtfm.daemon.node.daemon"
_PAUSED = UserError(
    "the daemon is paused, and only one that takes part can do that",
    "have it take part again: p2p-dtfm resume",
)

log = logging.getLogger("p2p_dtfm")


def _local_time() -> datetime:
    return now.at_home(now.wall_s())


class Resident:
    """Takes part, pauses, and takes part again, until it is told to leave or a run is done."""

    def __init__(
        self,
        settings: Settings,
        now: Callable[[], datetime] = _local_time,
        *,
        steps_aside: bool = False,
        away: Away | None = None,
    ) -> None:
        """`now`: the time of day here, for the hours. `steps_aside`: a pause raises `StepAside`
        instead of staying in this process. `away`: what a process that stepped aside has left."""
        self._settings = settings
        self._now = now
        self._hours = Hours.parse(settings.hours)
        self._yields = yields_of(settings, away.reason if away is not None else "")
        self._attention = Attention(settings)
        self._dashboard = DashboardHost()
        self._steps_aside = steps_aside
        self._away = away
        self._seen = Seen() if away is None else Seen.of(away.shown)
        self._last: dict[str, Any] = {} if away is None else away.status
        self._last_state: DashboardState | None = None if away is None else away.shown
        self.decide: Callable[[bool], None] | None = None
        """Called while the daemon is away, with whether it takes part again or ends."""
        self._held: Home | None = None
        """The home that is held while the daemon is away."""
        self._was_held = away is not None
        """This process has held the home, so it is never made anew."""
        self._is_within = False
        """The daemon has been in its hours since it was decided to take part. After that it pauses
        at their end, even if they end or the clock is corrected while the program loads."""
        self._comes_back = away is not None
        """The daemon has been away. It now begins by itself, with nobody watching."""
        self._is_held_up = away is not None and away.reason.startswith(IN_VAIN)
        """The daemon was to take part when it was last away, and could not. The user was told."""
        self._began_s = 0.0
        """When the daemon last began to take part."""
        self._told_to_leave = asyncio.Event()
        """Set if the daemon is told to leave after it was decided to take part again, and before
        there is a `Daemon` that hears it."""

    def named(self, text: str) -> str:
        """`text` with names in place of peer ids."""
        return self._seen.names.in_text(text)

    def let_go_of_home(self) -> None:
        """Free the home, as the operating system does for a process that was killed while away."""
        if self._held is not None:
            self._held.let_go()

    def state(self) -> DashboardState:
        """What the dashboard and the terminal show now."""
        return self._dashboard.state()

    async def run(self) -> int:
        """Returns the exit code. Raises `UserError`, and `StepAside` if it may."""
        try:
            return await self._live()
        except UserError as error:
            self._attention.ended(self.state(), self.named(error.cause))
            raise
        except StepAside:
            raise
        except Exception as error:
            fault = fault_of_disk(error, self._settings.home) if isinstance(error, OSError) else ""
            cause = fault or "p2p-dtfm has a bug; what it was is in its log"
            self._attention.ended(self.state(), cause)
            raise
        finally:
            await self._attention.close()
            await self._dashboard.close()

    async def _live(self) -> int:
        last_resort, past = self._settings, None
        if self._away is None:
            recalling = await _loaded("p2p_dtfm.daemon.peers.recall")  # a process away needs none
            past = await self._in_home(lambda: asyncio.to_thread(recalling.recall, last_resort))
        if (settings := await self._wait_to_begin()) is None:
            return 0
        if self._comes_back and is_replaced():  # the rest on disk would not fit what is loaded
            self._step_aside_if_may(come_back=settings, **AFRESH)
        while True:
            await self._load_what_trains()
            if self._told_to_leave.is_set():
                log.info("left before it took part")
                return 0
            daemon = self.make_daemon(settings, self._dashboard, self._seen)
            if self._settings.founds:
                daemon.come_as_founder()
            code = 0
            try:
                code = await self._take_part_within_hours(daemon, past)
                reason, until_s = daemon.pause_reason, daemon.pause_until_s
                self._is_held_up = False
            except (UserError, OSError) as error:
                reason, until_s = self._why_away(error, daemon, settings is last_resort)
                if reason is None and not self._is_to_leave(daemon):  # tries again as first started
                    if not self._settings.run:  # a founder might found anew by `run`
                        settings = self._settings
                    last_resort, past = settings, None
                    continue
            if reason is None:
                return code
            met, run_digest, past = daemon.acquaintances(), daemon.run_digest, None
            del daemon
            if run_digest:  # else it comes back to the run before, if there was one
                settings = to_come_back(self._settings, met, run_digest)
            self._step_aside_if_may(reason, settings, until_s)
            if not await self._stay_away(reason, self._ends_by_itself(reason), until_s):
                return 0
            self._comes_back = True

    def _why_away(
        self, error: UserError | OSError, daemon: "Daemon", is_last_resort: bool
    ) -> tuple[str | None, float | None]:
        """Why and until when, by the wall clock, the daemon stays away after this error. None: it
        has left, or tries elsewhere at once. An error that is the end is raised again."""
        pauses, is_to_leave = (daemon.pause_reason, daemon.pause_until_s), self._is_to_leave(daemon)
        if isinstance(error, UserError) and error.exit_code == UNREACHABLE:
            is_the_end = is_last_resort and daemon.pause_reason is None
            if is_to_leave or (is_the_end and not is_a_service()):
                raise error
            if not is_the_end:
                log.warning("those met before are gone: %s", error.cause)
                return pauses
        is_watched = not (self._comes_back or daemon.has_begun or is_a_service())
        took_s, home = now.monotonic_s() - self._began_s, self._settings.home
        pause_s = away_s(error, took_s)
        if not (reason := in_vain(error, home, daemon.has_begun, is_watched, pause_s)):
            raise error
        if is_to_leave:  # code 0: a service is begun again after a fault's code
            log.warning("leaves after a fault: %s", getattr(error, "cause", error))
            return None, None
        log.warning("%s", reason, exc_info=unexplained(error, home))
        if daemon.pause_reason is not None:
            return pauses
        self._is_held_up &= took_s < TRY_AGAIN_S
        self._tell_held_up(reason)
        return reason, now.wall_s() + pause_s

    def _tell_held_up(self, reason: str) -> None:
        """Tell the owner once, until the daemon has taken part for a while."""
        if not self._is_held_up:
            self._attention.held_up(self.state(), reason)
        self._is_held_up = True

    async def _in_home(self, attempt: Callable[[], Awaitable[Result]]) -> Result | None:
        """As `once_home_may_be_used`; signals are obeyed meanwhile."""

        def held_up(reason: str) -> None:
            log.warning("%s", reason)
            listen_for_the_end(
                lambda goes_on: self._told_to_leave.set(), self._settings.until_stdin_closes
            )
            self._tell_held_up(reason)

        return await once_home_may_be_used(attempt, self._told_to_leave, held_up)

    async def _acquire(self, home: Home) -> bool:
        """Whether the home is held. If not, this process is to leave. Raises `UserError`."""
        is_held = bool(await self._in_home(lambda: acquire(home, self._was_held)))
        self._was_held |= is_held
        return is_held

    def _is_to_leave(self, daemon: "Daemon") -> bool:
        return daemon.is_to_leave or self._told_to_leave.is_set()

    async def _wait_to_begin(self) -> Settings | None:
        """The settings to take part with, once the daemon may; None if it is to end instead."""
        if (away := self._away) is not None:
            goes_on = await self._stay_away(away.reason, away.by_itself, away.until_s)
            return Settings.model_validate(away.come_back) if goes_on else None
        why = await self._not_now()
        self._is_within, self._comes_back = why is None, why is not None
        goes_on = why is None or await self._stay_away(why, by_itself=True)
        return self._settings if goes_on else None

    async def _load_what_trains(self) -> None:
        """Load torch and libp2p, only now. The home is held meanwhile. Whoever asks for its daemon,
        or starts another one, is then told that one starts."""
        home = Home(self._settings.home)
        if _TRAINS in sys.modules or not await self._acquire(home):
            return
        log.info("loads the program")  # the first line; alone for half a minute on a slow machine
        try:
            await _loaded(_TRAINS)
        finally:
            home.release()

    def make_daemon(self, settings: Settings, dashboard: DashboardHost, seen: Seen) -> "Daemon":
        """The daemon on this machine. Simulated worlds override this."""
        from p2p_dtfm.daemon.node.daemon import Daemon  # loaded just before

        return Daemon(settings, dashboard, seen)

    def _step_aside_if_may(self, reason: str, come_back: Settings, until_s: float | None) -> None:
        """Raises `StepAside`. Until the other program runs, signals mean this one: the daemon that
        listened to them before is gone."""
        if self._steps_aside:
            listen_for_the_end(lambda goes_on: self._told_to_leave.set(), until_stdin_closes=False)
            away = Away(
                settings=as_plain(self._settings),
                come_back=as_plain(come_back),
                reason=reason,
                by_itself=self._ends_by_itself(reason),
                status=self._last,
                shown=self._shown_while_away(),
                port=self._dashboard.port,
                listener=self._dashboard.hand_over(),
                until_s=until_s,
            )
            raise StepAside(away, self._told_to_leave.is_set)

    @property
    def _outside(self) -> str:
        return f"takes part in the hours {self._hours} only"

    def _ends_by_itself(self, reason: str) -> bool:
        return reason in (self._outside, *REASONS.values())

    async def _take_part_within_hours(self, daemon: "Daemon", past: "Past | None") -> int:
        watching = [
            asyncio.create_task(kept_up(lambda: self._watch_hours(daemon))),
            asyncio.create_task(kept_up(lambda: self._watch_owner(daemon))),
            asyncio.create_task(
                kept_up(lambda: self._attention.keep_watching(daemon.observer.state))
            ),
            asyncio.create_task(self._leave_once_told(daemon)),
        ]
        self._began_s = now.monotonic_s()
        try:
            # after a wait for its home, that may be another one than `recall` read
            return await daemon.run(None if self._is_held_up else past)
        finally:
            for task in watching:
                task.cancel()
            state = daemon.observer.state()
            await self._attention.look(state)
            if daemon.run_digest:
                self._last, self._was_held = daemon.status_json(), True
            if daemon.run_digest or self._last_state is None:  # a try in vain has nothing to show
                self._last_state = state

    async def _watch_hours(self, daemon: "Daemon") -> None:
        """Pause when the hours end; after a resume outside of them, when they end next."""
        if self._hours is None:
            return
        while self._are_hours or not self._is_within:
            self._is_within = self._is_within or self._are_hours
            await asyncio.sleep(LOOK_EVERY_S)
        daemon.pause(self._outside)

    async def _watch_owner(self, daemon: "Daemon") -> None:
        """Pause when the owner of this machine needs it."""
        while self._yields is not None:
            if (reason := await self._yields.reason()) is not None:
                daemon.pause(reason)
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def _leave_once_told(self, daemon: "Daemon") -> None:
        """Tell `daemon` to leave, if a listener left over from the time away is told so."""
        await self._told_to_leave.wait()
        daemon.leave()

    @property
    def _are_hours(self) -> bool:
        return self._hours is None or self._hours.contain(self._now())

    async def _not_now(self) -> str | None:
        """Why the daemon takes no part now, if it is to come back by itself."""
        if not self._are_hours:
            return self._outside
        return await self._yields.reason() if self._yields is not None else None

    async def _stay_away(self, reason: str, by_itself: bool, until_s: float | None = None) -> bool:
        """Stay away; returns whether to take part again, or else to end. `by_itself`: take part
        once the hours and the machine's owner allow it. `until_s`: by the wall clock. Raises
        `UserError` if the home is taken, or cannot be used."""
        home = self._held = Home(self._settings.home)
        away = TimeAway(reason, by_itself, until_s, self._resume, self._told_to_leave.set)
        if not await self._acquire(home):
            return False
        self.decide, self._is_within = away.decide, False
        away.begin()
        self._seen.events.add(Event(round(now.wall_s(), 3), "note", f"paused: {reason}"))
        shown = self._shown_while_away()
        buttons = for_all_devices(home.root, {"resume": away.resume, "leave": away.leave})
        self._dashboard.show(lambda: shown_while_away(shown, away.status, self._seen), buttons)
        release_memory()  # nothing shows the daemon any more
        api = self._api_of(away, home)
        listen_for_the_end(away.decide, self._settings.until_stdin_closes)
        left = (self._away.port, self._away.listener) if self._away is not None else (None, None)
        try:
            await self._dashboard.start(self._settings.dashboard, home.root, *left)
            await self._dashboard.start_public(self._settings.public_status)
            await api.start()
            goes_on = await self._until_decided(away)
            if goes_on:  # loading may take half a minute
                away.status.say(State.STARTING, Status.reason)
                buttons = for_all_devices(home.root, {"leave": away.leave})
                self._dashboard.show(
                    lambda: shown_while_away(shown, away.status, self._seen), buttons
                )
            return goes_on
        finally:
            self.decide = None
            await api.close()
            home.release()

    async def _until_decided(self, away: TimeAway) -> bool:
        """Wait for the decision of the user, or of the hours and the machine's owner."""
        while (goes_on := away.decision) is None:
            await away.until_decided(LOOK_EVERY_S)
            await away.look_at_the_clock()
            why = await self._not_now() if away.by_itself else None
            if not away.by_itself:  # the user may have asked for a pause meanwhile
                continue
            if why is None:
                self._is_within = True
                away.decide(True)
            else:
                away.goes_on_for(why)
        return goes_on

    def _resume(self) -> None:
        """The user resumes, whatever the hours and the machine's owner say."""
        if self._yields is not None:
            self._yields.waive()
        self._is_within = self._are_hours

    def _api_of(self, away: TimeAway, home: Home) -> LocalApi:
        """The local API while the daemon is away."""

        async def not_while_paused(parameters: Mapping[str, str]) -> dict[str, Any]:
            return refusal_answer(_PAUSED)

        readers = {
            "status": lambda: self._status_json(away.status),
            "plan": lambda: {"view": None},
            "peers": lambda: [],
            "dashboard": self._dashboard.invitation,
        }
        actions = {"resume": away.resume, "leave": away.leave, "pause": away.pause}
        orders = {"pause-for": away.pause_for}
        orders |= dict.fromkeys(("invite", "revoke"), not_while_paused)
        app = make_app(readers, actions, {"trace": not_while_paused}, orders)
        return LocalApi(app, home.socket)

    def _shown_while_away(self) -> DashboardState:
        """What was reached, without the view and the step, which are no longer this peer's."""
        last = self._last_state or self._dashboard.state()
        return msgspec.structs.replace(
            last, view=ViewState(), timeline=Timeline(), events=self._seen.events.newest_first()
        )

    def _status_json(self, status: Status) -> dict[str, Any]:
        nothing: dict[str, Any] = dict.fromkeys(("view", "snapshot", "plan", "safe_step", "given"))
        nothing |= dict.fromkeys(("agreement", "weak_points", "tokens_per_s", "eta_s"))
        lists = ("members", "addresses", "layers", "stage", "waits_for", "waits")
        nothing |= {name: [] for name in lists} | {"names": {}, "tensors_over": {}}
        unknown = dict.fromkeys(("peer_id", "name", "run", "run_digest", "data", "checkpoints"))
        problems = msgspec.to_builtins(problems_while_away(status))
        here = {"dashboard": self._dashboard.address, "problems": problems, **status.as_json()}
        return {"version": __version__, **unknown, **self._last, **nothing, **here}


async def _loaded(name: str) -> Any:
    """Import that module in a thread, since it may take half a minute. Raises `UserError`."""
    try:
        with ends_at_once():
            return await asyncio.to_thread(importlib.import_module, name)
    except (ImportError, OSError) as error:
        raise of_an_import(error) or error from error
