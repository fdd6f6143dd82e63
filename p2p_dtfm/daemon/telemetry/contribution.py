"""What this peer has given to a run, over restarts: kept in the home, written seldom and whole."""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from p2p_dtfm.core.commit.shares import Tallies, shares_of
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.transcript.entries import Committed, Entry, TookOver
from p2p_dtfm.daemon.telemetry.names import Names
from p2p_dtfm.ports import disk, now
from p2p_dtfm.web.given_days import dated, day_of, newest, summed
from p2p_dtfm.web.state import BoardRow, ContributionBoard, Course, Given

FILE = "contribution.json"
WRITE_EVERY_S = 10.0
"""How often tallies are written. A peer that is killed loses how long it worked and what it sent
since; its steps are in the transcript."""
LARGE_BYTES = 256 << 10
WRITE_LARGE_EVERY_S = 60.0
"""How often large tallies are written: those of hundreds of peers, over hundreds of views."""
LONGEST_STEP_S = 600.0
STEPS_AT_MOST = 4
"""More time between two commits than this, and than this many times what the plan says, is no step:
the machine slept."""
DAYS_KEPT = 400
BOARD_LIMIT = 100
LIMIT_BYTES = 16 << 20
"""No more is written, nor read: hundreds of peers in each of hundreds of views would be more."""

log = logging.getLogger("p2p_dtfm")


class KeptTallies(msgspec.Struct, forbid_unknown_fields=True):
    """Tallies as they are on the disk. `days` are by the local calendar, as 2026-01-31."""

    tallies: Tallies = msgspec.field(default_factory=Tallies)
    days: dict[str, Given] = msgspec.field(default_factory=dict)
    older: Given = Given()
    course: Course = Course()
    undone: int = 0
    """What this peer gave, in tokens times layers, and others or itself have done again."""
    transcript_bytes: int | None = None
    """How many bytes of the run's transcript are counted here; None as long as nobody has said."""


class Contributions:
    """What one peer has given to one run."""

    def __init__(
        self,
        path: Path,
        spec: RunSpec,
        layer_count: int,
        me: str,
        transcript_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`transcript_bytes`: how long the run's transcript in this home is by now."""
        self._path = path
        self._transcript_bytes = transcript_bytes
        self._spec = spec
        self._layer_count = layer_count
        self._me = me
        self._kept, self._are_days_lost = _read(path)
        self._members: frozenset[Member] = frozenset()
        self.was_away = asyncio.Event()
        """Set where others have gone on without this process."""
        self._proven = 0
        """How many of the steps before it came others' transcripts have shown."""
        self._came_at: int | None = None
        """The first step of the unbroken row of views that this peer is in now."""
        self._committed_s: float | None = None
        self._longest_step_s = LONGEST_STEP_S
        self._written_s = now.monotonic_s()
        self._write_every_s = WRITE_EVERY_S
        self._lock = threading.Lock()
        self._made = self._written = 0
        """How many tallies were made for the disk, and the newest that it was given."""
        self._has_warned = False

    def view_took_over(self, view: View, step: int) -> None:
        """From `step` on this view's plan says who computes what."""
        self._follow(view.plan, step)
        planned_s = view.plan.predicted_step_ns / 1e9 if isinstance(view.plan, Plan) else 0.0
        self._longest_step_s = max(LONGEST_STEP_S, STEPS_AT_MOST * planned_s)
        self._lose(view)
        self._came_at = step if self._came_at is None else min(step, self._came_at)
        self._committed_s = now.monotonic_s()

    def left_views(self) -> None:
        """Others may take steps meanwhile. This peer may be told of the last of these once it is
        back."""
        self._came_at = None
        self._proven = 0
        self.was_away.set()

    def _lose(self, view: View) -> None:
        """Count the members that were lost. One that leaves in an orderly way takes part in
        agreeing on the view that is without it; one that is lost is absent from that."""
        lost = self._members & set(view.snapshot.absent) - set(view.members)
        before = self._kept.course
        began_s = now.wall_s() if before.began_s is None else before.began_s
        self._kept.course = Course(
            began_s, before.ended_s, before.losses + len(lost), before.views + 1
        )
        self._members = frozenset(view.members)

    def _follow(self, plan: Plan | NoPlan, step: int) -> None:
        shares: dict[str, int] = {}
        if isinstance(plan, Plan):
            shares = shares_of(plan, self._spec.tokens_per_step // max(1, plan.microbatch_count))
        before = self._kept.tallies.of(self._me)
        self._kept.tallies.view_took_over(step, shares)
        self._kept.undone += before - self._kept.tallies.of(self._me)

    @property
    def is_in_view(self) -> bool:
        """Whether this process takes part, and the others have not gone on without it."""
        return self._came_at is not None

    @property
    def seen_from(self) -> int:
        """From this step on this process has seen all. 0 while it is in no view."""
        return min(self._came_at or 0, self._spec.total_steps)  # what comes after them is no step

    @property
    def missing_steps(self) -> int:
        """How many of the steps before that one are missing here."""
        return self.seen_from - self._kept.tallies.known_before(self.seen_from)

    @property
    def unproven_steps(self) -> int:
        """How many of them nobody has shown here. Those that this peer has counted may have been
        done again without it."""
        return max(0, self.seen_from - self._kept.tallies.first_kept - self._proven)

    def settle(self, known: Mapping[int, Mapping[str, int]]) -> int:
        """Count who computed the steps that made this peer's states, before this process saw all.
        This counts even where this peer was told otherwise when it was last here. Returns how many
        more steps the board has."""
        tallies = self._kept.tallies
        steps, mine = tallies.step_count, tallies.of(self._me)
        shown = {step: shares for step, shares in known.items() if step < self.seen_from}
        tallies.settle(shown)
        self._proven = sum(step >= tallies.first_kept for step in shown)
        more = tallies.of(self._me) - mine
        if more >= 0:  # this peer was killed before it noted them
            self._kept.older = summed((self._kept.older, Given(tokens=more / self._layer_count)))
        else:
            self._kept.undone -= more
        return tallies.step_count - steps

    @property
    def counted_bytes(self) -> int | None:
        """Bytes of the transcript that were counted at the last write; None if that was before
        there were transcripts."""
        return self._kept.transcript_bytes

    def catch_up(self, entries: Iterable[Entry], wall_s: float) -> None:
        """Count what the transcript holds behind `counted_bytes`. It is of a process that was
        killed before it wrote its tallies, and lived until `wall_s`. How long its steps took, and
        what it sent, nobody has noted."""
        found = Given()
        for entry in entries:
            if isinstance(entry, TookOver):
                self._follow(entry.plan, entry.step)
            elif isinstance(entry, Committed) and (step := _step_of(entry)) is not None:
                if step >= self._spec.total_steps:
                    continue  # after the last one nothing is trained
                new = self._kept.tallies.committed(step)
                worked = self._kept.tallies.share(step, self._me)
                tokens = new * worked / self._layer_count
                found = summed((found, Given(tokens=tokens, steps=new if worked else 0)))
        days, day = self._kept.days, day_of(wall_s)
        if self._are_days_lost:
            self._kept.older = summed((self._kept.older, found))
        else:
            days[day] = summed((days.get(day, Given()), found))

    def committed(self, step: int, sent_bytes: int, guarded_bytes: int) -> None:
        """A step is committed. `sent_bytes`, `guarded_bytes`: those of a step, as the plan has it.
        A step that was made before this peer came, and is rolled forward here, is others' work."""
        now_s = now.monotonic_s()
        is_seen = step >= (self._came_at or 0)
        new = self._kept.tallies.committed(step) if is_seen else 0
        share = self._kept.tallies.share(step, self._me) if is_seen else 0
        before_s = now_s if self._committed_s is None else self._committed_s
        took_s = min(now_s - before_s, self._longest_step_s)
        self._committed_s = now_s
        if step + 1 >= self._spec.total_steps:
            self._kept.course = replace(self._kept.course, ended_s=now.wall_s())
        worked = share > 0
        given = Given(
            tokens=new * share / self._layer_count,
            steps=new if worked else 0,
            seconds=took_s,
            sent_bytes=sent_bytes if worked else 0,
            guarded_bytes=guarded_bytes,
        )
        today = day_of(now.wall_s())
        self._kept.days[today] = summed((self._kept.days.get(today, Given()), given))
        while len(self._kept.days) > DAYS_KEPT:
            oldest = min(self._kept.days)
            self._kept.older = summed((self._kept.older, self._kept.days.pop(oldest)))
        if now_s - self._written_s >= self._write_every_s:
            self._written_s = now_s
            number, payload = self._encoded()
            is_large = len(payload) > LARGE_BYTES
            self._write_every_s = WRITE_LARGE_EVERY_S if is_large else WRITE_EVERY_S
            # a thread of its own, that knows which disk this daemon lives by
            context = contextvars.copy_context()
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, context.run, self._write, number, payload)

    def write(self) -> None:
        """Write all of it, at the end."""
        self._write(*self._encoded())

    def _encoded(self) -> tuple[int, bytes]:
        self._kept.transcript_bytes = self._transcript_bytes()
        payload = msgspec.json.encode(self._kept)
        while len(payload) > LIMIT_BYTES and self._kept.tallies.fold_older_half():
            payload = msgspec.json.encode(self._kept)
        self._made += 1
        return self._made, payload

    def _write(self, number: int, payload: bytes) -> None:
        """Write it whole or not at all. A full disk costs what came since the last time, not the
        daemon. What a busy thread comes to only after newer tallies is left out."""
        with self._lock:
            if number < self._written:
                return
            self._written = number
            try:
                disk.write_whole(self._path, payload)
                self._has_warned = False
            except OSError as error:
                level = logging.DEBUG if self._has_warned else logging.WARNING
                log.log(level, "what this peer has given is not written down: %s", error)
                self._has_warned = True

    def shown(self, names: Names) -> ContributionBoard:
        """What people are shown, by names; the board goes from the most to the least."""
        wall_s, days = now.wall_s(), self._kept.days
        tallies = self._kept.tallies
        board = sorted(tallies.board().items(), key=lambda item: (-item[1], item[0]))
        undated = ContributionBoard(
            ever=summed((self._kept.older, *days.values())),
            board=tuple(
                BoardRow(peer_id, names.of(peer_id), share / self._layer_count)
                for peer_id, share in board[:BOARD_LIMIT]
            ),
            board_peers=len(board),
            board_tokens=sum(share for _, share in board) / self._layer_count,
            board_steps=tallies.step_count,
            course=self._kept.course,
            useful_tokens=tallies.of(self._me) / self._layer_count,
            repeated_tokens=self._kept.undone / self._layer_count,
            days=newest(days, wall_s),
        )
        return dated(undated, wall_s)


def _step_of(entry: Committed) -> int | None:
    """The step, as the first member that signed it says. It is read, not checked: the file is this
    home's own, and `p2p-dtfm verify` is there to check."""
    try:
        return decode(entry.signed[0].payload, Prepared).step if entry.signed else None
    except PeerFault:
        return None


def _read(path: Path) -> tuple[KeptTallies, bool]:
    """The tallies of a file; none where it is missing. A damaged one is put aside, and all is
    counted from the transcript again. That does not say on which days it was, so the second value
    is true then."""
    try:
        if (size_bytes := path.stat().st_size) <= LIMIT_BYTES:
            return msgspec.json.decode(path.read_bytes(), type=KeptTallies), False
        log.warning("what this peer had given is not read: it has %d bytes", size_bytes)
    except FileNotFoundError:
        return KeptTallies(transcript_bytes=0), False
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        log.warning("what this peer had given cannot be read: %s", error)
    try:
        path.replace(path.with_suffix(".damaged"))
    except OSError as error:
        log.warning("it cannot be put aside either: %s", error)
    return KeptTallies(transcript_bytes=0), True
