"""A home, its machine, and the daemon that runs there in virtual time."""

import asyncio
import json
import math
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.daemon import Daemon
from p2p_dtfm.daemon.node.resident import Resident
from p2p_dtfm.testbed.virtual.disk import VirtualDisk
from p2p_dtfm.testbed.virtual.loop import tasks_here
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.wires.host import VirtualHost

HOME_OF_THE_LIVING = frozenset({"daemon.lock", "daemon.sock"})


@dataclass(frozen=True)
class Ending:
    """What has ended a daemon, and how far that had come."""

    error: BaseException
    has_run: bool
    was_in_a_view: bool


@dataclass
class Peer:
    """One home, and the daemon that runs in it now, if one does."""

    name: str
    home: Path
    settings: Settings
    peer_id: str
    flops_per_s: int
    disk: VirtualDisk
    wall_ahead_ns: int = 0
    """Its machine's clock, of the world's."""
    is_outside_hours: bool = False
    """Of those in which its owner lets it take part, where it stays resident."""
    process: Process | None = None
    started_s: float = 0.0
    """When that began."""
    daemon: Daemon | None = None
    host: VirtualHost | None = None
    has_dumb_p2pd: bool = False
    """Also one that is started now."""
    resident: Resident | None = None
    """What stays while its owner has paused it, where it was started so."""
    ended: asyncio.Task[int] | None = None
    is_told_to_leave: bool = False
    """Since it was started, and to end: a resident that is told to pause stays."""
    past: list[Process] = field(default_factory=list)
    past_endings: list[Ending] = field(default_factory=list)
    """Of daemons before this one."""
    _events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return self.ended is not None and not self.ended.done() and self._lives()

    @property
    def is_asleep(self) -> bool:
        return self.is_running and self.process is not None and self.process.is_asleep

    @property
    def awake_since_s(self) -> float:
        """Since when it runs and its machine does not sleep: for ever not, if one of them does."""
        if not self.is_running or self.process is None or self.process.is_asleep:
            return math.inf
        return max(self.started_s, self.process.woke_ns / 1e9)

    @property
    def has_run(self) -> bool:
        """It takes part in a run, and answers others who ask for it."""
        return self.daemon is not None and bool(self.daemon.run_digest)

    @property
    def is_in_a_view(self) -> bool:
        """Of a run, as it sees it."""
        return self.view_id is not None

    @property
    def view_id(self) -> ViewId | None:
        """Of the view that it is in, as it sees it."""
        agreement = self._agreement()
        view = agreement.view if agreement is not None else None
        return view.id if view is not None else None

    @property
    def is_let_in(self) -> bool:
        """Agreed on for a view to come, for which it may have to fetch much."""
        agreement = self._agreement()
        return agreement is not None and agreement.next_view is not None

    def _agreement(self) -> Agreement | None:
        api = self.daemon.status_api if self.daemon is not None else None
        participant = api.participant if api is not None else None
        return participant.membership.agreement if participant is not None else None

    def was_in_a_view(self) -> bool:
        """Since it was started."""
        views = (event for event in self.events() if event["event"] == "view")
        return any(event["at_s"] >= self.started_s for event in views)

    @property
    def was_ever_killed(self) -> bool:
        return any(process.is_dead for process in self.past) or self.was_killed

    @property
    def was_killed(self) -> bool:
        return self.process is not None and self.process.is_dead

    @property
    def is_away(self) -> bool:
        """Paused by its owner; `Swarm.come_back` ends that."""
        return self.is_running and self.resident is not None and self.resident.decide is not None

    @property
    def is_leaving_for_a_pause(self) -> bool:
        """Told to pause, and not away yet."""
        is_here = self.is_running and self.resident is not None and not self.is_away
        return is_here and self.daemon is not None and self.daemon.pause_reason is not None

    def _lives(self) -> bool:
        return self.process is not None and not self.process.is_dead

    def step(self) -> int:
        """The last one that it has seen committed."""
        return max(self.losses(), default=-1)

    @property
    def takes_part(self) -> bool:
        """In a run, and does not only hear at its door that it is complete."""
        api = self.daemon.status_api if self.daemon is not None else None
        return api is not None and api.participant is not None

    def told_step(self) -> int:
        """As it shows it: how many are committed, or what it heard from the others."""
        return self.daemon.observer.step() if self.daemon is not None else 0

    def layers(self) -> set[int]:
        """Whose states are here."""
        told = self.daemon.status_json() if self.daemon is not None else {}
        return set(told.get("layers", ()))

    def relays(self) -> set[str]:
        """Peers that pass others on to this one, as it says."""
        told = self.daemon.status_json() if self.is_running and self.daemon is not None else {}
        return set(told.get("reachability", {}).get("relays", ()))

    def events(self) -> list[dict[str, Any]]:
        """Also of what a disk has refused or lost; `at_s` is the world's time."""
        for at_s, line in self.disk.told[len(self._events) :]:
            self._events.append(json.loads(line) | {"at_s": at_s})
        return self._events

    def losses(self) -> dict[int, float]:
        steps = [event for event in self.events() if event["event"] == "step"]
        return {each["step"]: each["loss"] for each in steps if each["loss"] is not None}

    def standing(self) -> str:
        """What it says of itself."""
        if not self.is_running or self.daemon is None:
            return "not running"
        status = self.daemon.status_json()
        return f"{status.get('state')}: {status.get('reason')} (step {status.get('step')})"

    def waits(self) -> list[str]:
        """Where each of its tasks is."""
        mine = Counter(it.waits_at() for it in tasks_here() if it.process is self.process)
        told = [f"    {count} x {place}" for place, count in sorted(mine.items())]
        return told if self.is_running else []

    def failures(self) -> list[str]:
        processes = [*self.past, *([self.process] if self.process else [])]
        return [failure for process in processes for failure in process.failures]

    def copy_home(self) -> Path:
        """As it is, without what shows that somebody lives there."""
        copy = self.home.with_name(f"{self.name}-before")
        shutil.copytree(self.home, copy, ignore=_not_of_the_living, dirs_exist_ok=True)
        return copy

    def put_home_back(self, copy: Path) -> None:
        """In the place of what is there; nobody runs in it."""
        shutil.rmtree(self.home)
        copy.rename(self.home)
        self.disk.note_replaced()


def _not_of_the_living(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name in HOME_OF_THE_LIVING}
