"""The daemons of a local swarm, seen from outside while they come, go and are killed. It sees their
processes, what they write of their run, and where they can be called."""

import signal
import time
from collections.abc import Callable, Collection, Iterable

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.local_client import ask_daemon
from p2p_dtfm.testbed.growing_history import GrowingHistory
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.recovery.times import Event, Histories

Say = Callable[[float, int, str], None]
"""Is told: seconds since the beginning, the committed step, and what happened."""

POLL_S = 0.1
ADDRESS_WAIT_S = 30.0
INITIAL_PEERS = 3
"""A joiner is told so many addresses: one of the peers may be stopped or cut off next."""


class WatchedSwarm:
    """Daemons go by names. One that starts again in its home keeps its name."""

    def __init__(self, swarm: LocalSwarm, peer_ids: dict[str, str], total_steps: int) -> None:
        """`peer_ids` are by name. `total_steps` is that of the run spec."""
        self._swarm = swarm
        self._last_step = total_steps - 1
        self._names = {peer_id: name for name, peer_id in peer_ids.items()}
        self._histories = {child.name: GrowingHistory(child.home) for child in swarm.children}
        self._read_to_the_end: set[str] = set()
        """Daemons that had ended when their history was read: a storm has hundreds of dead."""
        self._told_views: set[str] = set()
        self._killed: set[object] = set()
        """Killed processes, and not their ids: in a storm another one may have one of these."""
        self._told_to_leave: set[object] = set()

    # processes ----------------------------------------------------------------------------------

    @property
    def children(self) -> list[Child]:
        """The newest process of each peer."""
        return list({child.name: child for child in self._swarm.children}.values())

    def child(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)

    @property
    def running(self) -> set[str]:
        return {child.name for child in self.children if child.running}

    def kill(self, name: str) -> None:
        """Ends the process at once, without a word."""
        process = self.child(name).process
        self._killed.add(process)
        process.kill()
        process.wait()

    def came(self, child: Child, peer_id: str = "") -> None:
        """Notes a daemon that was just started; `peer_id` if that peer was never there before."""
        if peer_id:
            self._names[peer_id] = child.name
        self._histories.setdefault(child.name, GrowingHistory(child.home))

    def tell_to_leave(self, name: str) -> None:
        """Tells the daemon to leave, and does not wait."""
        process = self.child(name).process
        self._told_to_leave.add(process)
        process.send_signal(signal.SIGTERM)

    def end_all(self) -> None:
        """Tells all daemons to leave, and does not wait."""
        for child in self.children:
            if child.running:
                self.tell_to_leave(child.name)

    def wrong_ends(self) -> list[str]:
        """Daemons that ended by themselves though not all was done, or with an error."""
        wrong = []
        for child in self._swarm.children:
            process = child.process
            code = process.poll()
            was_killed = code == -signal.SIGKILL and process in self._killed
            if code == 0 and process not in self._told_to_leave and self.step < self._last_step:
                how = "by itself before the last step"
            elif code not in (None, 0) and not was_killed:
                how = f"with code {code}"
            else:
                continue
            wrong.append(f"{child.name} ended {how}: {child.log_tail()}")
        return wrong

    def states(self) -> list[str]:
        """What each daemon says that it does, to find out why nothing happens."""
        return [
            f"{child.name}: {facts['state']} ({facts['reason']})"
            for child in self.children
            if child.running and (facts := child.status()) is not None
        ]

    # what they write ----------------------------------------------------------------------------

    def history(self, name: str) -> GrowingHistory:
        return self._histories[name]

    @property
    def histories(self) -> Histories:
        self.read()
        return {name: history.events for name, history in self._histories.items()}

    @property
    def step(self) -> int:
        """The highest committed step, once the daemons' histories are read up to now."""
        self.read()
        return max((history.step for history in self._histories.values()), default=-1)

    def read(self) -> None:
        """Reads what the daemons have written since the last call."""
        running = self.running
        for name, history in self._histories.items():
            if name in running or name not in self._read_to_the_end:
                history.read()
        self._read_to_the_end = self._histories.keys() - running

    def take_views(self) -> list[Event]:
        """New views, each once, as the first daemon that wrote it down."""
        self.read()
        new = [event for history in self._histories.values() for event in history.take_views()]
        found = []
        for event in sorted(new, key=lambda event: event["time_s"]):
            if event["snapshot"] not in self._told_views:
                self._told_views.add(event["snapshot"])
                found.append(event)
        return found

    def newest_view(self) -> Event | None:
        """The newest view, as far as the histories were read."""
        views = [v for v in (history.view for history in self._histories.values()) if v is not None]
        return max(views, key=lambda view: view["view"], default=None)

    def has_stepped(self, view: Event) -> bool:
        """Whether some member has committed a step in this view. A view that repeats steps does so
        below the highest step that ever was."""
        return any(
            history.has_stepped
            and history.view is not None
            and history.view["view"] == view["view"]
            for history in self._histories.values()
        )

    def all_take_part(self, away: Collection[str] = ()) -> bool:
        """Whether the newest view has every daemon that runs and is not `away`, and no other."""
        newest = self.newest_view()
        members = newest["members"] if newest is not None else ()
        names = {self._names[peer_id] for peer_id in members}
        return self.running - set(away) <= names <= self.running

    # where they are -----------------------------------------------------------------------------

    def addresses(self, stopped: Iterable[str] = ()) -> tuple[str, ...]:
        """Addresses of peers that answer. Raises `UserError`."""
        end_s, not_asked = time.monotonic() + ADDRESS_WAIT_S, set(stopped)
        while time.monotonic() < end_s:
            asked = [c for c in self.children if c.running and c.name not in not_asked]
            found = [address for child in asked if (address := self._own_address(child))]
            if found:
                return tuple(found[:INITIAL_PEERS])
            time.sleep(POLL_S)
        raise UserError("no daemon of the swarm answers any more", "see the logs", exit_code=1)

    def _own_address(self, child: Child) -> str | None:
        for record in ask_daemon(child.home, "peers") or ():
            if self._names.get(record["peer_id"]) == child.name and record["addresses"]:
                return str(record["addresses"][0])
        return None


def view_in_words(event: Event) -> str:
    count = len(event["members"])
    text = f"view {event['view']} from step {event['step']}: {count} peer{'s' if count > 1 else ''}"
    if (kept := event.get("kept_microbatches")) is not None:
        text += f"; microbatches at stages: {kept} kept, {event['redone_microbatches']} redone"
    return text
