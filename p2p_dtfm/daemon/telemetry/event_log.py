"""The run's history at this peer: one JSON object a line."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from p2p_dtfm.daemon.telemetry.status import Troubles
from p2p_dtfm.ports import disk, now

LIMIT_BYTES = 64 << 20
TAIL_BYTES = 1 << 16
"""The part of the file in which the newest step is looked for."""
FILE_NAME = "events.jsonl"

log = logging.getLogger("p2p_dtfm")


class EventLog:
    """Appends to a file; past `LIMIT_BYTES` it becomes `*.old`, in the place of an older one."""

    def __init__(self, path: Path, troubles: Troubles | None = None) -> None:
        self._path = path
        self._troubles = troubles or Troubles()
        self._has_warned = False
        self._before = "\n" if _ends_within_a_line(path) else ""
        """What ends the line that an earlier life was writing when it ended."""

    def write(self, event: str, **facts: Any) -> None:
        """A full disk costs the line, not the daemon."""
        line = json.dumps({"time_s": round(now.wall_s(), 3), "event": event, **facts})
        try:
            if self._path.exists() and self._path.stat().st_size > LIMIT_BYTES:
                disk.name(self._path, self._path.with_suffix(".old"))
            disk.append(self._path, f"{self._before}{line}\n")
            self._before = ""
            self._troubles.over("history")
            self._has_warned = False
        except OSError as error:
            # warn once: there is a line for each step, and the full disk may hold the log itself
            log.log(
                logging.DEBUG if self._has_warned else logging.WARNING,
                "event not recorded: %s",
                error,
            )
            self._has_warned = True
            self._troubles.tell(
                "history",
                f"the history of this run cannot be written: {error.strerror}",
                f"free space on the disk of {self._path.parent}, or make it writable",
            )

    def last_step(self) -> int:
        """The newest step that an earlier life of this home has told of near the file's end; -1 if
        there is none."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._path.stat().st_size - TAIL_BYTES))
                lines = file.read(TAIL_BYTES).splitlines()
        except OSError:
            return -1
        events = (_parsed(line) for line in reversed(lines))
        found = (event["step"] for event in events if event and event.get("event") == "step")
        step = next(found, -1)
        return step if isinstance(step, int) else -1


class RecoveryMarks:
    """When this peer came how far on the way to a view after a failure: `stopped_s`, `gathered_s`,
    `planned_s`. They are in seconds of the wall clock, like `time_s`. Of several attempts the last
    counts, but of stops the first."""

    def __init__(self) -> None:
        self._marks: dict[str, float] = {}

    def stopped(self) -> None:
        """The step under way is stopped, since somebody is suspected. What an overtaken attempt had
        gathered and planned is dropped."""
        if "stopped_s" not in self._marks:
            self._marks = {"stopped_s": round(now.wall_s(), 3)}

    def gathered(self) -> None:
        """All contributions are here, and the plan is begun."""
        self._marks["gathered_s"] = round(now.wall_s(), 3)

    def planned(self) -> None:
        """This peer's own plan is there; others' may not be."""
        self._marks["planned_s"] = round(now.wall_s(), 3)

    def take(self) -> dict[str, float]:
        """What was noted since the last view; nothing where no step was stopped."""
        marks, self._marks = self._marks, {}
        return marks if "stopped_s" in marks else {}


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """The events in a run's directory, oldest first. A line that was torn is left out."""
    newest = directory / FILE_NAME
    for path in (newest.with_suffix(".old"), newest):
        if not path.is_file():
            continue
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if (event := _parsed(line)) is not None:
                    yield event


def _ends_within_a_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # none is there, or it is empty
        return False


def _parsed(line: str | bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None
