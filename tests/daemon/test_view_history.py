"""The views that a peer was in, on its disk."""

from pathlib import Path

from p2p_dtfm.core.messages.agreement_messages import KnownView
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.daemon.machine.view_history import ViewHistory

VIEWS = tuple(KnownView(ViewId(n, "x"), (Member("a", 1),), "plan") for n in range(4))


def test_it_is_read_back_for_its_run_only(tmp_path: Path) -> None:
    history = ViewHistory(tmp_path, "run")
    history.keep(VIEWS)
    history.write()
    assert ViewHistory(tmp_path, "run").read() == VIEWS
    assert ViewHistory(tmp_path, "another").read() == ()


def test_a_write_that_comes_late_does_not_bring_back_what_was_before(tmp_path: Path) -> None:
    """Two views are taken over one after the other; the thread of the first one runs last."""
    history = ViewHistory(tmp_path, "run")
    history.keep(VIEWS[:2])
    late = history.write
    history.keep(VIEWS)
    history.write()
    late()
    assert history.read() == VIEWS
