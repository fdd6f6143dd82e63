"""What this peer has given to a run, over restarts: kept in the home, written seldom and whole."""

import asyncio
import contextvars
import logging
import threading
from datetime import datetime
from pathlib import Path

import msgspec

from p2p_dtfm.core.commit.shares import Tallies, shares_of
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.telemetry.names import Names
from p2p_dtfm.ports import disk, now
from p2p_dtfm.web.state import BoardRow, Contribution, Given

FILE = "contribution.json"
WRITE_EVERY_S = 60.0
LONGEST_STEP_S = 600.0
"""More between two commits is no step, but a machine that slept."""
DAYS_KEPT = 400
BOARD_LIMIT = 100
LIMIT_BYTES = 16 << 20

log = logging.getLogger("p2p_dtfm")


class Kept(msgspec.Struct, forbid_unknown_fields=True):
    """As it is on the disk. `days`: by the local calendar, as 2026-01-31."""

    tallies: Tallies = msgspec.field(default_factory=Tallies)
    days: dict[str, Given] = msgspec.field(default_factory=dict)
    older: Given = Given()


class Contributions:
    """Of one peer to one run."""

    def __init__(self, path: Path, spec: RunSpec, layer_count: int, me: str) -> None:
        self._path = path
        self._spec = spec
        self._layer_count = layer_count
        self._me = me
        self._kept = _read(path)
        self._share = 0
        self._committed_s: float | None = None
        self._written_s = now.monotonic_s()
        self._lock = threading.Lock()

    def view_took_over(self, view: View, step: int) -> None:
        """From `step` on, as this view's plan says."""
        shares: dict[str, int] = {}
        if isinstance(view.plan, Plan):
            microbatches = sum(it.microbatch_count for it in view.plan.pipelines)
            shares = shares_of(view.plan, self._spec.tokens_per_step // max(1, microbatches))
        self._share = shares.get(self._me, 0)
        self._kept.tallies.view_took_over(step, shares)
        self._committed_s = now.monotonic_s()

    def committed(self, step: int, sent_bytes: int, guarded_bytes: int) -> None:
        """`sent_bytes`, `guarded_bytes`: of a step, as the plan has it."""
        now_s = now.monotonic_s()
        self._kept.tallies.committed(step)
        before_s = now_s if self._committed_s is None else self._committed_s
        took_s = min(now_s - before_s, LONGEST_STEP_S)
        self._committed_s = now_s
        worked = self._share > 0
        given = Given(
            tokens=self._share / self._layer_count,
            steps=int(worked),
            seconds=took_s,
            sent_bytes=sent_bytes if worked else 0,
            guarded_bytes=guarded_bytes,
        )
        today = _day(now.wall_s())
        self._kept.days[today] = _sum(self._kept.days.get(today, Given()), given)
        while len(self._kept.days) > DAYS_KEPT:
            oldest = min(self._kept.days)
            self._kept.older = _sum(self._kept.older, self._kept.days.pop(oldest))
        if now_s - self._written_s >= WRITE_EVERY_S:
            self._written_s = now_s
            payload = msgspec.json.encode(self._kept)
            # a thread of its own, that knows which disk this daemon lives by
            context = contextvars.copy_context()
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, context.run, self._write, payload)

    def write(self) -> None:
        """All of it, at the end."""
        self._write(msgspec.json.encode(self._kept))

    def _write(self, payload: bytes) -> None:
        """Whole or not at all. A full disk costs what came since the last time, not the daemon."""
        with self._lock:
            try:
                disk.write_whole(self._path, payload)
            except OSError as error:
                log.warning("what this peer has given is not written down: %s", error)

    def shown(self, names: Names) -> Contribution:
        """For people, by names; the board from the most to the least."""
        wall_s, days = now.wall_s(), self._kept.days
        week = {_day(wall_s - 86_400 * back) for back in range(7)}
        tallies = self._kept.tallies
        board = sorted(tallies.board().items(), key=lambda item: (-item[1], item[0]))
        return Contribution(
            today=days.get(_day(wall_s), Given()),
            week=_sum(*(given for day, given in days.items() if day in week)),
            ever=_sum(self._kept.older, *days.values()),
            board=tuple(
                BoardRow(peer_id, names.of(peer_id), share / self._layer_count)
                for peer_id, share in board[:BOARD_LIMIT]
            ),
            board_steps=tallies.step_count,
        )


def _day(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s).astimezone().date().isoformat()


def _sum(*each: Given) -> Given:
    fields = Given.__struct_fields__
    return Given(*(sum(getattr(given, name) for given in each) for name in fields))


def _read(path: Path) -> Kept:
    """Nothing where it is missing; a damaged one is put aside, and counting begins anew."""
    try:
        if path.stat().st_size <= LIMIT_BYTES:
            return msgspec.json.decode(path.read_bytes(), type=Kept)
    except FileNotFoundError:
        return Kept()
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        log.warning("what this peer had given cannot be read: %s", error)
    try:
        path.replace(path.with_suffix(".damaged"))
    except OSError as error:
        log.warning("it cannot be put aside either: %s", error)
    return Kept()
