"""How far a long task is, and how long it will still take: bars on a terminal, else JSON lines."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

Tell = Callable[[int, int, str], None]
"""Bytes done, bytes in all, and what is being done."""

LINE_EVERY_S = 10.0
PLANS_BETWEEN_LINES = 10


@contextmanager
def progress_of_bytes() -> Iterator[Tell]:
    """Where there is no terminal, a task that takes less than `LINE_EVERY_S` prints nothing."""
    if not sys.stderr.isatty():
        yield ProgressLines(time.monotonic, lambda line: print(line, file=sys.stderr, flush=True))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True) as bars:
        tasks: dict[str, object] = {}

        def tell(done_bytes: int, total_bytes: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total_bytes)
            bars.update(tasks[what], completed=done_bytes, total=total_bytes)  # type: ignore[arg-type]

        yield tell


def plans_made(what: str) -> Callable[[int, int], None]:
    """Tells how many plans of `what` are made, out of at most how many: each may take a second."""

    def tell(done: int, most: int) -> None:
        if sys.stderr.isatty():
            told = f"\r\x1b[Kplanned {done} of at most {most} {what}"
            print(told, end="\r", file=sys.stderr, flush=True)
        elif done % PLANS_BETWEEN_LINES == 0:
            facts = {"doing": f"planning {what}", "done": done, "most": most}
            print(json.dumps(facts), file=sys.stderr, flush=True)

    return tell


class ProgressLines:
    """Prints a JSON object now and then, for logs and other programs."""

    def __init__(self, clock_s: Callable[[], float], write: Callable[[str], None]) -> None:
        self._clock_s = clock_s
        self._write = write
        self._what = ""
        self._began_bytes = 0
        """Where a task that was interrupted goes on."""
        self._began_s = self._told_s = 0.0

    def __call__(self, done_bytes: int, total_bytes: int, what: str) -> None:
        now_s = self._clock_s()
        if what != self._what:
            self._what, self._began_s, self._told_s = what, now_s, now_s
            self._began_bytes = done_bytes
        if now_s - self._told_s < LINE_EVERY_S or not self._began_bytes < done_bytes <= total_bytes:
            return
        self._told_s = now_s
        since_bytes = done_bytes - self._began_bytes
        left_s = (now_s - self._began_s) * (total_bytes - done_bytes) / since_bytes
        facts = {
            "doing": what,
            "done_bytes": done_bytes,
            "total_bytes": total_bytes,
            "left_s": round(left_s, 1),
        }
        self._write(json.dumps(facts))
