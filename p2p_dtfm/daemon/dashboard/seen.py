"""What a home's daemons have seen of their run, one after another; it outlasts a pause."""

from collections import deque

from p2p_dtfm.daemon.dashboard.series import Series
from p2p_dtfm.daemon.telemetry.names import Names
from p2p_dtfm.ports import now
from p2p_dtfm.web.given_days import dated
from p2p_dtfm.web.state import ContributionBoard, DashboardState, Event, Samples

EVENTS_LIMIT = 200


class Events:
    """The latest events, as one object until another comes."""

    def __init__(self) -> None:
        self._held: deque[Event] = deque(maxlen=EVENTS_LIMIT)
        self._made: tuple[Event, ...] | None = ()

    def add(self, event: Event) -> None:
        self._held.append(event)
        self._made = None

    def newest_first(self) -> tuple[Event, ...]:
        if self._made is None:
            self._made = tuple(reversed(self._held))
        return self._made


class Seen:
    """What was seen; the next daemon on the same home goes on with it."""

    def __init__(self) -> None:
        self.series = Series()
        self.names = Names()
        self.events = Events()
        self.samples = Samples()
        self.contribution = ContributionBoard()
        self.committed_count = 0
        self.undone_count = 0

    def given(self) -> ContributionBoard:
        """What this peer has given, as of today, even if it has given nothing since."""
        self.contribution = dated(self.contribution, now.wall_s())
        return self.contribution

    @classmethod
    def of(cls, shown: DashboardState) -> "Seen":
        """What a process before this one has shown last."""
        seen = cls()
        for event in reversed(shown.events):
            seen.events.add(event)
        seen.series.take_up(shown.history)
        seen.samples = shown.samples
        seen.contribution = shown.contribution
        seen.committed_count = shown.live.committed_here
        seen.undone_count = shown.live.undone_here
        return seen
