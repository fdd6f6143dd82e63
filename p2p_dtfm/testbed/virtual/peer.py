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
    """What ended a daemon, and how far the daemon had come."""

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
    """How far its machine's clock is ahead of the world's."""
    is_outside_hours: bool = False
    """Its owner's hours are over. A resident stays then, and takes no part."""
    process: Process | None = None
    started_s: float = 0.0
    """When its present process began."""
    daemon: Daemon | None = None
    host: VirtualHost | None = None
    has_dumb_p2pd: bool = False
    """Its p2pd does not answer what its daemon asks of it. A host that is started later is so,
    too."""
    resident: Resident | None = None
    """What stays while the owner has paused the daemon, where it was started as a resident."""
    ended: asyncio.Task[int] | None = None
    is_told_to_leave: bool = False
    """Since its start it was told to end. A resident that is told only to pause is not meant."""
    past: list[Process] = field(default_factory=list)
    past_endings: list[Ending] = field(default_factory=list)
    """Endings of earlier daemons in this home."""
    _events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return self.ended is not None and not self.ended.done() and self._lives()

    @property
    def is_asleep(self) -> bool:
        return self.is_running and self.process is not None and self.process.is_asleep

    @property
    def awake_since_s(self) -> float:
        """Since when it has run on a machine that is awake; infinite, if it does not run or
        sleeps."""
        if not self.is_running or self.process is None or self.process.is_asleep:
            return math.inf
        return max(self.started_s, self.process.woke_ns / 1e9)

    @property
    def has_run(self) -> bool:
        """It knows its run, and answers others who ask for that run."""
        return self.daemon is not None and bool(self.daemon.run_digest)

    @property
    def is_in_a_view(self) -> bool:
        """It sees itself in a view of its run."""
        return self.view_id is not None

    @property
    def view_id(self) -> ViewId | None:
        """The view that it sees itself in."""
        agreement = self._agreement()
        view = agreement.view if agreement is not None else None
        return view.id if view is not None else None

    @property
    def is_let_in(self) -> bool:
        """Members have agreed on a next view with it, for which it may have to fetch much."""
        agreement = self._agreement()
        return agreement is not None and agreement.next_view is not None

    def _agreement(self) -> Agreement | None:
        api = self.daemon.status_api if self.daemon is not None else None
        participant = api.participant if api is not None else None
        return participant.membership.agreement if participant is not None else None

    def was_in_a_view(self) -> bool:
        """Whether it was in a view since it was started."""
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
        """Its owner has paused it; `Swarm.come_back` ends that."""
        return self.is_running and self.resident is not None and self.resident.decide is not None

    @property
    def is_leaving_for_a_pause(self) -> bool:
        """It is told to pause, and not away yet."""
        is_here = self.is_running and self.resident is not None and not self.is_away
        return is_here and self.daemon is not None and self.daemon.pause_reason is not None

    def _lives(self) -> bool:
        return self.process is not None and not self.process.is_dead

    def step(self) -> int:
        """The last step that it has seen committed."""
        return max(self.losses(), default=-1)

    @property
    def takes_part(self) -> bool:
        """It takes part in a run, and does not only hear at its door that the run is complete."""
        api = self.daemon.status_api if self.daemon is not None else None
        return api is not None and api.participant is not None

    def told_step(self) -> int:
        """The step that it shows: how many it knows committed, or what it heard from the others."""
        return self.daemon.observer.step() if self.daemon is not None else 0

    def layers(self) -> set[int]:
        """The layers whose states it has."""
        told = self.daemon.status_json() if self.daemon is not None else {}
        return set(told.get("layers", ()))

    def relays(self) -> set[str]:
        """The peers that, as it says, relay to it."""
        told = self.daemon.status_json() if self.is_running and self.daemon is not None else {}
        return set(told.get("reachability", {}).get("relays", ()))

    def events(self) -> list[dict[str, Any]]:
        """Its history, also lines that the disk refused or lost. `at_s` is the world's time."""
        for at_s, line in self.disk.told[len(self._events) :]:
            self._events.append(json.loads(line) | {"at_s": at_s})
        return self._events

    def losses(self) -> dict[int, float]:
        steps = [event for event in self.events() if event["event"] == "step"]
        return {each["step"]: each["loss"] for each in steps if each["loss"] is not None}

    def standing(self) -> str:
        """What the daemon says of its own state."""
        if not self.is_running or self.daemon is None:
            return "not running"
        status = self.daemon.status_json()
        return f"{status.get('state')}: {status.get('reason')} (step {status.get('step')})"

    def waits(self) -> list[str]:
        """Where each of its tasks waits."""
        mine = Counter(it.waits_at() for it in tasks_here() if it.process is self.process)
        told = [f"    {count} x {place}" for place, count in sorted(mine.items())]
        return told if self.is_running else []

    def failures(self) -> list[str]:
        processes = [*self.past, *([self.process] if self.process else [])]
        return [failure for process in processes for failure in process.failures]

    def copy_home(self) -> Path:
        """A copy of its home, without the files that show that a daemon lives there."""
        copy = self.home.with_name(f"{self.name}-before")
        shutil.copytree(self.home, copy, ignore=_not_of_the_living, dirs_exist_ok=True)
        return copy

    def put_home_back(self, copy: Path) -> None:
        """Puts `copy` in the place of its home, in which nobody runs."""
        shutil.rmtree(self.home)
        copy.rename(self.home)
        self.disk.note_replaced()


def _not_of_the_living(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name in HOME_OF_THE_LIVING}
