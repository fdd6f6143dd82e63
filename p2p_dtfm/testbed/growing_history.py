"""What a daemon writes of its run, read while the daemon writes."""

import json
from collections.abc import Iterator
from pathlib import Path

from p2p_dtfm.testbed.recovery.times import Event


class GrowingHistory:
    """Reads a daemon's history as it grows."""

    def __init__(self, home: Path) -> None:
        self.events: list[Event] = []
        self.step = -1
        self.view: Event | None = None
        self.has_stepped = False
        """Some step was committed in that view."""
        self._new_views: list[Event] = []
        self._home = home
        self._offsets: dict[Path, int] = {}

    def read(self) -> None:
        for event in self._new_events():
            self.events.append(event)
            if event["event"] == "step" and event["loss"] is not None:
                self.step = max(self.step, event["step"])
                begins = self.view["step"] if self.view is not None else 0
                self.has_stepped |= event["step"] >= begins  # a step before it may come later
            elif event["event"] == "view":
                self.view, self.has_stepped = event, False
                self._new_views.append(event)

    def take_views(self) -> list[Event]:
        """Views that have come since the last call."""
        taken, self._new_views = self._new_views, []
        return taken

    def _new_events(self) -> Iterator[Event]:
        for path in self._home.glob("runs/*/events.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole, newline, _ = data.rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            for line in whole.splitlines():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    continue  # a line that a killed daemon did not end
