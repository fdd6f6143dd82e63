"""What a run by invitation prints: no addresses that let nobody in."""

import re

import pytest

from p2p_dtfm.cli.commands import invite as cli_invite
from p2p_dtfm.cli.commands.swarm import _ways_in
from p2p_dtfm.web.qr import qr_in_terminal


def test_a_picture_of_the_line_fits_a_terminal(capsys) -> None:  # type: ignore[no-untyped-def]
    qr_in_terminal("p2p-dtfm --invite p2pi1-" + "A" * 600)
    rows = capsys.readouterr().out.splitlines()
    assert 20 < len(rows) < 70 and any("█" in row or "▀" in row for row in rows)


def test_a_picture_that_the_terminal_would_break_is_not_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the usual 80 columns the terminal broke rows of a long line's picture in two."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for columns, is_drawn in (("80", False), ("120", True)):
        monkeypatch.setenv("COLUMNS", columns)
        qr_in_terminal("p2p-dtfm --invite p2pi1-" + "A" * 600)
        shown = capsys.readouterr().out
        assert (f"this terminal has {columns}" in shown) is not is_drawn
        assert max(map(len, re.sub("\x1b.*?m", "", shown).splitlines())) <= 120


def test_addresses_are_told_where_they_let_somebody_in() -> None:
    facts = {"addresses": ["/ip4/1"], "admission": "members"}
    assert _ways_in(facts) == ["--initial-peers /ip4/1"]
    assert _ways_in({**facts, "admission": "invited"}) == ["a line that p2p-dtfm invite prints"]
    assert _ways_in({"addresses": [], "admission": "invited"}) == []


def test_nobody_is_told_how_to_join_a_complete_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`invite` said that anybody may join, and who came was told that the run is complete."""
    facts = {"addresses": ["/ip4/1"], "admission": "members", "state": "done"}
    assert _ways_in(facts) == [] and _ways_in({**facts, "state": "training"})
    for is_complete in (False, True):
        made = {"line": "p2pi1-", "name": None, "is_complete": is_complete}
        monkeypatch.setattr(cli_invite, "call_daemon", lambda *of, made=made: made)
        cli_invite.invite(None, "7d", False, False, False)
        told = capsys.readouterr().err
        assert ("nobody can join it any more" in told) is is_complete
        assert ("anybody may join this run" in told) is not is_complete
