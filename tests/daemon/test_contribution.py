"""A peer's contribution outlasts the peer's process, and a damaged file ends no daemon."""

import asyncio
import json
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.names import generated_name
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.dashboard.seen import Seen
from p2p_dtfm.daemon.proof.counted_again import contributions_beside
from p2p_dtfm.daemon.proof.transcript_file import FILE_NAME, Transcript
from p2p_dtfm.daemon.telemetry import contribution
from p2p_dtfm.daemon.telemetry.contribution import FILE, WRITE_EVERY_S, Contributions
from p2p_dtfm.daemon.telemetry.names import Names
from p2p_dtfm.ports import disk, now
from p2p_dtfm.web.given_days import newest
from p2p_dtfm.web.state import Course, Given
from tests.core.builders import run_spec
from tests.core.planning import Peer, name_of, snapshot

SHOT = snapshot([Peer()])
PLAN = compute_plan(SHOT)
SPEC = run_spec(total_steps=300)
LAYERS = SHOT.workload.layer_count


def made(folder: Path) -> Contributions:
    return Contributions(folder / FILE, SPEC, LAYERS, name_of(0))


def test_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    assert isinstance(PLAN, Plan)
    first = made(tmp_path)
    first.view_took_over(View(SHOT, PLAN), 0)
    for step in range(3):
        first.committed(step, 1000, 10)
    first.write()
    again = made(tmp_path)
    again.view_took_over(View(SHOT, PLAN), 2)
    again.committed(2, 1000, 0)
    again.committed(3, 1000, 0)
    shown = again.shown(Names())
    (row,) = shown.board
    assert (row.name, shown.board_steps) == (generated_name(name_of(0)), 4)
    assert row.tokens == 4 * SPEC.tokens_per_step, "the third step counts once"
    assert shown.ever == shown.today == shown.week
    assert (shown.ever.steps, shown.ever.sent_bytes, shown.ever.guarded_bytes) == (5, 5000, 30), (
        "what was done twice was given twice"
    )
    assert shown.repeated_tokens == SPEC.tokens_per_step, "the third step was undone once"
    assert shown.useful_tokens == shown.board[0].tokens
    assert shown.ever.tokens == shown.useful_tokens + shown.repeated_tokens


@pytest.mark.parametrize("away_from", [3, 4])
def test_what_others_made_while_it_was_away_is_not_its_own(tmp_path: Path, away_from: int) -> None:
    """A peer that came back and rolled its last step forward counted all steps since it had
    gone."""
    gives = made(tmp_path)
    gives.view_took_over(View(SHOT, PLAN), 0)
    for step in range(away_from):
        gives.committed(step, 1000, 0)
    gives.left_views()
    gives.view_took_over(View(SHOT, PLAN), 5)
    gives.committed(4, 1000, 0)
    shown = gives.shown(Names())
    assert shown.board_steps == away_from
    assert shown.ever.tokens == shown.useful_tokens == away_from * SPEC.tokens_per_step
    assert (shown.ever.steps, shown.ever.sent_bytes) == (away_from, 1000 * away_from)
    gives.committed(5, 1000, 0)
    gives.view_took_over(View(SHOT, PLAN), 7)
    gives.committed(6, 1000, 0)
    assert gives.shown(Names()).board_steps == away_from + 2, "the last one of the view before"


def test_what_a_proof_takes_away_was_done_again_and_what_it_adds_was_given(tmp_path: Path) -> None:
    """The peer was killed before it noted its last step, and after another step that did not
    stay."""
    first = made(tmp_path)
    first.view_took_over(View(SHOT, PLAN), 0)
    for step in range(5):
        first.committed(step, 0, 0)
    first.write()
    again, mine = made(tmp_path), {name_of(0): SPEC.tokens_per_step * LAYERS}
    again.view_took_over(View(SHOT, PLAN), 8)
    assert (again.seen_from, again.missing_steps) == (8, 3)
    others = {"another": SPEC.tokens_per_step * LAYERS}
    assert again.settle({4: others, 5: mine, 6: mine, 7: others, 8: others, 9: others}) == 3
    assert again.missing_steps == 0
    shown = again.shown(Names())
    assert [row.tokens / SPEC.tokens_per_step for row in shown.board] == [6, 2]
    assert shown.board_steps == 8, "from the eighth on it sees for itself"
    assert shown.useful_tokens == 6 * SPEC.tokens_per_step
    assert shown.ever.tokens == pytest.approx(shown.useful_tokens + shown.repeated_tokens)


def test_the_look_at_the_model_after_the_last_step_is_no_step(tmp_path: Path) -> None:
    """A peer that came after the run's last step counted 17 steps of 16, by the transcript of
    another (the seed 505735). Where nobody had told of that look, it asked for ever."""
    given, total = made(tmp_path), SPEC.total_steps
    given.view_took_over(View(SHOT, PLAN), total + 1)
    assert given.missing_steps == total
    shares = {"another": SPEC.tokens_per_step * LAYERS}
    assert given.settle(dict.fromkeys(range(total + 1), shares)) == total
    assert given.missing_steps == 0
    assert given.shown(Names()).board_steps == total


def view(number: int, *records: PeerRecord, absent: tuple[str, ...] = (), life: int = 1) -> View:
    shot = msgspec.structs.replace(
        SHOT,
        number=number,
        records=records,
        absent=tuple(Member(peer_id, life) for peer_id in absent),
    )
    return View(shot, PLAN)


def test_who_leaves_is_no_loss_and_who_is_killed_is_one(tmp_path: Path) -> None:
    three = snapshot([Peer(), Peer(), Peer()]).records
    last = name_of(2)
    left = made(tmp_path / "left")
    left.view_took_over(view(1, *three), 0)
    left.view_took_over(view(2, *three[:2]), 5)
    assert left.shown(Names()).course.losses == 0

    (tmp_path / "killed").mkdir()
    killed = made(tmp_path / "killed")
    killed.view_took_over(view(1, *three), 0)
    killed.view_took_over(view(2, *three[:2], absent=(last,), life=three[2].life), 5)
    killed.view_took_over(view(3, *three[:2], absent=(last,), life=three[2].life), 6)
    assert killed.shown(Names()).course.losses == 1, "once, however many views tell of it"
    killed.write()
    again = made(tmp_path / "killed")
    again.view_took_over(view(4, *three[:2]), 7)
    assert again.shown(Names()).course.losses == 1, "kept over a restart"


def test_when_the_run_began_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_s = 1000.0
    monkeypatch.setattr(now, "wall_s", lambda: at_s)
    given = made(tmp_path)
    given.view_took_over(View(SHOT, PLAN), 0)
    at_s = 2000.0
    given.view_took_over(View(SHOT, PLAN), 1)
    given.committed(SPEC.total_steps - 2, 0, 0)
    assert given.shown(Names()).course == Course(1000.0, None, 0, 2)
    at_s = 3000.0
    given.committed(SPEC.total_steps - 1, 0, 0)
    assert given.shown(Names()).course == Course(1000.0, 3000.0, 0, 2)


def test_days_and_weeks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(PLAN, Plan)
    at_s = time.time()
    monkeypatch.setattr(now, "wall_s", lambda: at_s)
    given = made(tmp_path)
    given.view_took_over(View(SHOT, PLAN), 0)
    for step, days in enumerate((0, 3, 1, 30)):
        at_s += 86_400 * days
        given.committed(step, 0, 0)
    shown = given.shown(Names())
    assert (shown.today.steps, shown.week.steps, shown.ever.steps) == (1, 1, 4)


def test_yesterdays_is_not_todays_where_nothing_was_given_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may be paused, or its run complete."""
    at_s = time.time()
    monkeypatch.setattr(now, "wall_s", lambda: at_s)
    given = made(tmp_path)
    given.view_took_over(View(SHOT, PLAN), 0)
    given.committed(0, 0, 0)
    seen = Seen()
    seen.contribution = given.shown(Names())
    assert seen.given() is seen.contribution and seen.given().today.steps == 1
    at_s += 86_400
    board = seen.given()
    assert (board.today.steps, board.week.steps, board.ever.steps) == (0, 1, 1)
    assert seen.given() is board, "unchanged: the same object"
    at_s += 7 * 86_400
    assert (seen.given().week.steps, seen.given().ever.steps) == (0, 1)


def test_a_week_has_the_day_of_23_hours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        night_s = datetime(2026, 3, 30, 0, 30).astimezone().timestamp()
        days = {"2026-03-29": Given(steps=3), "2026-03-24": Given(steps=4)}
        assert newest({**days, "2026-03-23": Given(steps=5)}, night_s) == days
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_board_of_very_many_says_how_many_and_how_much(tmp_path: Path) -> None:
    given = made(tmp_path)
    given.view_took_over(View(SHOT, PLAN), 200)
    given.settle({step: {f"peer-{step}": (step + 1) * LAYERS} for step in range(150)})
    shown = given.shown(Names())
    assert len(shown.board) == 100 and shown.board[0].tokens == 150
    assert (shown.board_peers, shown.board_tokens) == (150, 150 * 151 / 2)


@pytest.mark.parametrize("planned_s, counted_s", [(1, 600), (1500, 1800)])
def test_a_step_of_half_an_hour_counts_where_one_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned_s: int, counted_s: int
) -> None:
    """A large model's step counted as ten minutes at most."""
    clock_s = 1000.0
    monkeypatch.setattr(now, "monotonic_s", lambda: clock_s)
    assert isinstance(PLAN, Plan)
    slow = msgspec.structs.replace(PLAN, predicted_step_ns=planned_s * 10**9)
    given = made(tmp_path)
    given._written_s = float("inf")  # nothing is written here
    given.view_took_over(View(SHOT, slow), 0)
    clock_s += 1800.0
    given.committed(0, 0, 0)
    assert given.shown(Names()).ever.seconds == counted_s


def test_a_damaged_file_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    assert made(tmp_path).shown(Names()).board == ()
    assert (tmp_path / "contribution.damaged").read_text() == "{"


def test_what_would_be_too_large_to_be_read_again_is_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of many peers in many views was written. The next start dropped it, with all days and
    all tallies of peers."""
    monkeypatch.setattr(contribution, "LIMIT_BYTES", 6000)
    given = made(tmp_path)
    given.view_took_over(View(SHOT, PLAN), 100)
    given.committed(100, 1000, 0)
    given.settle({step: {f"{at}-{step % 2}": 100 for at in range(20)} for step in range(100)})
    before = given.shown(Names())
    given.write()
    assert (tmp_path / FILE).stat().st_size <= 6000
    shown = made(tmp_path).shown(Names())
    assert (shown.board, shown.days) == (before.board, before.days)
    assert shown.board_steps == before.board_steps == 101 and shown.ever.sent_bytes == 1000


def test_what_is_too_large_is_put_aside_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / FILE).open("wb") as file:
        file.truncate(contribution.LIMIT_BYTES + 1)
    assert made(tmp_path).shown(Names()).board == ()
    assert "is not read: it has 16777217 bytes" in caplog.text
    assert (tmp_path / "contribution.damaged").exists()


def test_it_is_written_to_the_disk_that_the_daemon_lives_by(tmp_path: Path) -> None:
    """The thread that writes now and then uses that disk as well."""

    class Full(disk.MachineDisk):
        refused = 0

        def write_whole(self, path: Path, payload: disk.Payload, mode: int) -> None:
            self.refused += 1
            raise OSError(28, "No space left on device")

    full = Full()

    async def gives() -> None:
        disk.live_by(full)
        given = made(tmp_path)
        given._written_s -= WRITE_EVERY_S
        given.committed(0, 0, 0)
        await asyncio.get_running_loop().shutdown_default_executor()
        given.write()

    asyncio.run(gives())
    assert full.refused == 2 and not list(tmp_path.iterdir())


def written(folder: Path, steps: range) -> Transcript:
    """A transcript in which one peer commits these steps."""
    transcript = Transcript(folder / FILE_NAME, SPEC, 1 << 20)
    certificate = Certificate(SHOT.view_id, "", SHOT.members, ())
    transcript.took_over(View(SHOT, PLAN, certificate), steps.start)
    for step in steps:
        prepared = Prepared(SHOT.view_id, step, name_of(0), {}, 1.0, 1, 0.0, 0, None)
        said = sign_prepared(prepared, lambda _: bytes(64))
        transcript.committed(step, (said,))
    return transcript


def beside(transcript: Transcript) -> Contributions:
    return contributions_beside(transcript, SPEC, LAYERS, name_of(0))


def test_a_killed_process_has_its_steps_counted_from_the_transcript(tmp_path: Path) -> None:
    first = beside(written(tmp_path, range(0, 2)))
    shown = first.shown(Names())
    assert (shown.board_steps, shown.today.steps, shown.ever.steps) == (2, 2, 2)
    first.write()
    transcript = written(tmp_path, range(2, 5))
    again = beside(transcript).shown(Names())
    assert (again.board_steps, again.ever.steps) == (5, 5), "what was counted is not counted twice"
    assert again.useful_tokens == again.board[0].tokens and again.repeated_tokens == 0
    assert again.board[0].tokens == again.ever.tokens == 5 * SPEC.tokens_per_step


def test_a_damaged_file_is_counted_again_but_not_on_one_day(tmp_path: Path) -> None:
    transcript = written(tmp_path, range(0, 3))
    (tmp_path / FILE).write_text("{")
    shown = beside(transcript).shown(Names())
    assert (shown.board_steps, shown.today.steps, shown.ever.steps) == (3, 0, 3)


def test_tallies_of_before_there_were_transcripts_are_not_doubled(tmp_path: Path) -> None:
    transcript = written(tmp_path, range(0, 3))
    beside(transcript).write()
    kept = json.loads((tmp_path / FILE).read_bytes())
    del kept["transcript_bytes"]
    (tmp_path / FILE).write_text(json.dumps(kept))
    shown = beside(transcript).shown(Names())
    assert (shown.board_steps, shown.ever.steps) == (3, 3)


def test_tallies_that_a_busy_thread_comes_to_late_replace_no_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tallies, written as the daemon ended, were replaced by those of before: their thread
    had stood in line behind files."""
    given, late = made(tmp_path), list[Callable[[], None]]()
    given._write_every_s = 0.0  # for the first step alone

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        put_off = lambda executor, work, *rest: late.append(partial(work, *rest))  # noqa: E731
        monkeypatch.setattr(loop, "run_in_executor", put_off)
        given.view_took_over(View(SHOT, PLAN), 0)
        given.committed(0, 1000, 0)
        given.committed(1, 1000, 0)
        given.write()
        for write in late:
            write()

    asyncio.run(scenario())
    assert len(late) == 1
    assert made(tmp_path).shown(Names()).ever.steps == 2


def test_what_a_power_cut_took_of_the_transcript_is_not_looked_for_behind_its_end(
    tmp_path: Path,
) -> None:
    """The tallies were on the disk, and the transcript's last lines were not. After a kill in the
    seconds that followed all up to the old end was passed over: a new view's line among it, so its
    steps counted for those of the view before."""
    transcript = written(tmp_path, range(0, 6))
    beside(transcript).write()
    lines = transcript.path.read_bytes().splitlines(keepends=True)
    transcript.path.write_bytes(b"".join(lines[:3]))
    beside(Transcript(transcript.path, SPEC, 1 << 20))  # it is killed before it writes its tallies
    transcript = written(tmp_path, range(1, 6))
    again = beside(transcript).shown(Names())
    assert again.repeated_tokens == 5 * SPEC.tokens_per_step, "all but the first was done again"
    assert (again.board_steps, again.ever.steps) == (6, 11)
