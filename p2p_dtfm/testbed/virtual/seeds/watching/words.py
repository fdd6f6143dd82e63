"""What daemons log in a seed: what nobody may say of another peer, and everybody's last words."""

import collections
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from p2p_dtfm.daemon.node.network import DISCONNECTED
from p2p_dtfm.daemon.node.participation.participant import BLAMED, NO_PLACE
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.listening import listening
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.seeds.judge import Broken

MESSAGES_TOLD = 12


class Blames(logging.Handler):
    """Nobody may blame an honest peer for what no correct peer does; liars may blame anybody. A
    peer behind a slow line that has not heard that it lost its place may still send what it owed. A
    peer whose memory changes bytes is told so of what came. And nobody logs a mistake of its
    own."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lying = Lying({}, together=False)
        self.damaged: set[str] = set()
        """Peer ids of those whose bytes are changed."""
        self._first = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and self.lying.here() not in self.lying.ids:
            self._first = self._first or f"a bug, as it says itself: {Story().format(record)}"
            return
        said = record.args if isinstance(record.args, tuple) else ()
        if record.msg not in (BLAMED, DISCONNECTED) or self._first or NO_PLACE in said:
            return
        blamed = said[0] if said else ""
        if blamed in self.damaged or blamed in self.lying.names:
            return
        if self.lying.here() not in self.lying.ids:
            self._first = f"an honest peer is blamed: {Story().format(record)}"

    def require_none(self) -> None:
        """Raises `Broken`."""
        if self._first:
            raise Broken(self._first)

    @contextmanager
    def heard(self) -> Iterator[None]:
        level = min(logging.getLogger("p2p_dtfm").level, logging.WARNING)
        with listening(self, level or logging.WARNING):
            yield


class _Lines(logging.Handler):
    """The last few lines of each process."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(Story())
        self.by_process: dict[str, collections.deque[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get()
        name = process.name.split(".")[0] if process is not None else ""
        lines = self.by_process.setdefault(name, collections.deque(maxlen=MESSAGES_TOLD))
        lines.append(self.format(record))


class Story(logging.Formatter):
    """A line with the time, and who says it."""

    def format(self, record: logging.LogRecord) -> str:
        process = PROCESS.get()
        if process is None:
            return record.getMessage()
        return f"{process.awake_or_asleep_ns() / 1e9:9.3f} {process.name} {record.getMessage()}"


@contextmanager
def last_messages() -> Iterator[dict[str, collections.deque[str]]]:
    """The last lines of each peer, by name. The world's own deeds have no name."""
    lines = _Lines()
    with listening(lines, logging.INFO):
        yield lines.by_process
