"""The report of a complete run: one page that loads nothing and obeys no text in it."""

import contextvars
import errno
import re
from datetime import datetime
from pathlib import Path

import msgspec

from p2p_dtfm.daemon.dashboard.report_file import FILE, last_words, next_commands, write_report
from p2p_dtfm.ports import disk
from p2p_dtfm.web.report import report_html
from p2p_dtfm.web.state import DashboardState, Live
from tests.web.examples import NOW_S, two
from tests.web.screens import screen


def test_it_holds_what_happened_and_needs_nothing_beside_it() -> None:
    state = two().state
    page = report_html(state, ("p2p-dtfm generate --prompt 'def '",))
    assert "<polyline" in page and "Who took part" in page and "p2p-dtfm generate" in page
    assert state.run is not None and state.run.digest in page
    assert state.contribution.board[1].name in page
    assert "61,200 tokens, of which 1,200 were lost in a failure and done again" in page
    assert not re.search(r"<script|<link|src=|url\(|https?:", page)


def test_it_tells_when_and_how_many_were_lost_and_no_more_than_was_seen() -> None:
    page = report_html(screen(3, "done"), ())
    assert "<td>peers lost</td><td>1, without those that left in an orderly way</td>" in page
    assert "<td>took</td><td>2 h 12 min</td>" in page
    began = datetime.fromtimestamp(NOW_S - 8000).astimezone()
    assert f"<td>began</td><td>{began:%Y-%m-%d %H:%M}" in page
    assert "by 2 peers that this one saw" in page
    assert "<td>ended</td><td>this peer did not see it</td>" in report_html(two().state, ())
    assert "What to do with it" not in page, "nothing to type, no heading"


def test_it_counts_all_of_very_many_peers_and_views() -> None:
    """The page holds a hundred peers and a few hundred views."""
    state = screen(3, "done")
    given = state.contribution
    course = msgspec.structs.replace(given.course, views=4321)
    given = msgspec.structs.replace(given, board_peers=len(given.board) + 398, course=course)
    page = report_html(msgspec.structs.replace(state, contribution=given), ())
    assert "by 400 peers that this one saw" in page and "<p>and 398 more, with fewer</p>" in page
    assert "<td>views</td><td>4,321</td>" in page
    course = msgspec.structs.replace(course, views=1)
    history = msgspec.structs.replace(state.history, view_step=tuple(range(7)))
    given = msgspec.structs.replace(given, course=course)
    page = report_html(msgspec.structs.replace(state, contribution=given, history=history), ())
    assert "<td>views</td><td>7</td>" in page, "a home that was there before views were counted"


def test_what_strangers_and_the_model_say_is_text() -> None:
    page = report_html(two().state, ())
    assert "&lt;b&gt;Ada &amp; co." in page and "<b>Ada" not in page
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;" in page


def test_before_anything_happened_it_can_be_written_too(tmp_path: Path) -> None:
    state = DashboardState(Live(0.0, "0", "", "starting", "", 0.0))
    assert write_report(tmp_path / FILE, state, ())
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert not write_report(tmp_path / "missing" / FILE, state, ())


def test_the_last_words_give_thanks_and_the_next_lines(tmp_path: Path) -> None:
    commands = next_commands(tmp_path / "a home")
    words = last_words(two().state, tmp_path / FILE, commands)
    assert any(line.startswith("thank you: 61,200 tokens") for line in words)
    assert f"next: p2p-dtfm generate --home '{tmp_path}/a home' --prompt 'def '" in words
    nothing = msgspec.structs.replace(two().state, contribution=type(two().state.contribution)())
    assert not any("thank you" in line for line in last_words(nothing, None, ()))


def test_who_has_seen_no_step_leaves_the_report_of_who_did(tmp_path: Path) -> None:
    """A daemon started again after the end overwrote the report with a page without losses, peers
    and texts."""
    path, seen = tmp_path / FILE, two().state
    assert seen.live.committed_here and write_report(path, seen, ())
    whole = path.read_text()
    started_again = DashboardState(Live(0.0, "0", "", "done", "", 0.0, step=seen.live.step))
    assert write_report(path, started_again, ()) and path.read_text() == whole
    lines = last_words(started_again, path, ())
    assert f"what became of it: {path}" in lines, "it is named all the same"
    assert write_report(path, seen, ("another",)) and path.read_text() != whole


class FullDisk(disk.MachineDisk):
    def write_whole(self, path: Path, payload: disk.Payload, mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_the_report_and_keeps_no_half_of_it(tmp_path: Path) -> None:
    """The report went past the port to disks. So no seed's disk refused it, half of it stayed on a
    machine's full disk, and after a power cut it could be empty: it was not forced to the disk."""

    def write() -> bool:
        disk.live_by(FullDisk())
        return write_report(tmp_path / FILE, two().state, ())

    assert not contextvars.copy_context().run(write)
    assert not list(tmp_path.iterdir())
