"""The views that a peer was in, on its disk."""

import contextvars
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from p2p_dtfm.core.consensus.views.reminders import Signatures
from p2p_dtfm.core.messages.agreement_messages import Active, KnownView
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.snapshot import Bar, Member, ViewId
from p2p_dtfm.daemon.machine.view_history import ViewHistory
from p2p_dtfm.ports import disk
from p2p_dtfm.testbed.virtual.disk import VirtualDisk

VIEWS = tuple(KnownView(ViewId(n, "x"), (Member("a", 1),), "plan") for n in range(4))


def test_it_is_read_back_for_its_run_only(tmp_path: Path) -> None:
    history = ViewHistory(tmp_path, "run")
    history.keep(VIEWS)
    history.write()
    assert ViewHistory(tmp_path, "run").read() == VIEWS
    assert ViewHistory(tmp_path, "another").read() == ()


def test_who_was_convicted_is_remembered_with_them(tmp_path: Path) -> None:
    bars = (Bar(VIEWS[1].view, 7, "b", 1, 407, "works otherwise"),)
    history = ViewHistory(tmp_path, "run")
    history.keep(VIEWS, bars)
    history.write()
    assert ViewHistory(tmp_path, "run").read_bars() == bars
    assert ViewHistory(tmp_path, "another").read_bars() == ()


def test_what_others_have_signed_is_remembered_with_them(tmp_path: Path) -> None:
    certificate = Certificate(VIEWS[1].view, "plan", VIEWS[1].members, ((Member("a", 1), b"s"),))
    signed = (Signatures(certificate, (Active(Member("a", 1), VIEWS[1].view, 3, "x"),)),)
    history = ViewHistory(tmp_path, "run")
    history.keep(VIEWS, (), signed)
    history.write()
    assert ViewHistory(tmp_path, "run").read_signatures() == signed
    assert ViewHistory(tmp_path, "another").read_signatures() == ()


def test_a_file_from_before_there_were_bars_is_read(tmp_path: Path) -> None:
    old = {"run_digest": "run", "views": [msgspec.to_builtins(view) for view in VIEWS]}
    (tmp_path / "views.msgpack").write_bytes(encode(old))
    assert ViewHistory(tmp_path, "run").read() == VIEWS


def test_a_run_in_between_has_nobody_forgiven_and_nothing_forgotten(tmp_path: Path) -> None:
    """A home kept the last run's history alone. After a day in another run it had forgiven who was
    barred, and its former fellows were strangers."""
    bars = (Bar(VIEWS[1].view, 7, "b", 1, 407, "works otherwise"),)
    for run, views, convicted in (("run", VIEWS, bars), ("another", VIEWS[:1], ())):
        history = ViewHistory(tmp_path, run)
        history.keep(views, convicted)
        history.write()
    assert ViewHistory(tmp_path, "run").read_bars() == bars
    assert ViewHistory(tmp_path, "run").read() == VIEWS
    assert ViewHistory(tmp_path, "another").read() == VIEWS[:1]


def test_a_write_that_comes_late_does_not_bring_back_what_was_before(tmp_path: Path) -> None:
    """Two views are taken over one after the other, and the thread of the first one runs last."""
    history = ViewHistory(tmp_path, "run")
    history.keep(VIEWS[:2])
    late = history.write
    history.keep(VIEWS)
    history.write()
    late()
    assert history.read() == VIEWS


def test_what_is_written_outlives_a_power_cut(tmp_path: Path) -> None:
    """The file was forced to the disk, and its name was not. Peers barred in the seconds before all
    lost power were forgiven (seed 600020)."""
    turns: Any = SimpleNamespace(now_ns=0, job_ns=0, in_job=True)
    machine_disk = VirtualDisk(turns)

    def write() -> None:
        disk.live_by(machine_disk)
        history = ViewHistory(tmp_path, "run")
        history.keep(VIEWS)
        history.write()

    contextvars.copy_context().run(write)
    first: Any = SimpleNamespace(randint=lambda least, most: least)
    machine_disk.power_was_cut(first)
    assert ViewHistory(tmp_path, "run").read() == VIEWS
