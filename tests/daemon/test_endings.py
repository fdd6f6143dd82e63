"""What ends a daemon is told to its user as what it is: a gone peer, or a bug."""

import asyncio
import contextvars
import json
import os
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.protocol.records import LIFE_LIMIT
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.machine.home import BESIDE_FILE, Home
from p2p_dtfm.daemon.machine.life import Life
from p2p_dtfm.daemon.node import coming_and_going
from p2p_dtfm.daemon.node.coming_and_going import Departure
from p2p_dtfm.daemon.node.daemon import _until_end, explained
from p2p_dtfm.daemon.telemetry import event_log
from p2p_dtfm.daemon.telemetry.event_log import EventLog
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.ports import now
from tests.core.builders import WORKLOAD
from tests.daemon.trainer_parts import view_of

SECOND_NS = 1_000_000_000


def test_gone_peers_are_no_bug() -> None:
    inner = ExceptionGroup("sends", [Unreachable("x", "stream reset"), Refused("no", "y")])
    error = explained(ExceptionGroup("step", [inner, Unreachable("x", "stream reset")]))
    assert isinstance(error, UserError) and error.exit_code == 6
    assert error.cause.count("stream reset") == 1 and "y: no" in error.cause
    assert "--initial-peers" in error.fixes[0]


def test_a_bug_among_them_stays_a_bug() -> None:
    group = ExceptionGroup("step", [Unreachable("x", "gone"), ValueError("ours")])
    assert explained(group) is group
    assert isinstance(explained(AssertionError("ours")), AssertionError)


def test_what_goes_wrong_after_the_last_step_is_no_good_end() -> None:
    """Nobody looked, and the daemon ended with 0."""

    async def run_ended() -> None:
        raise ValueError("ours")

    async def to_the_end() -> int:
        participant = SimpleNamespace(
            local=SimpleNamespace(life=Life(lambda: None)),
            network=SimpleNamespace(host=SimpleNamespace(lost=asyncio.Event())),
            trainer=SimpleNamespace(done=asyncio.Event()),
        )
        departure = SimpleNamespace(participant=participant, run_ended=run_ended)
        return await _until_end(departure)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="ours"):
        asyncio.run(to_the_end())


class Ending:
    """A daemon whose run is complete, and which ends with it. Each time that it looks ten seconds
    are over, and another member has fetched some of the model, until it has got so many pieces."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
        self.now_s, self.pieces = 0.0, pieces
        self.given = Counter[str]()
        monkeypatch.setattr(
            coming_and_going, "now", SimpleNamespace(monotonic_s=lambda: self.now_s)
        )
        monkeypatch.setattr(coming_and_going, "TICK_S", 0.0)

    def is_whole(self, step: int, members: set[str]) -> bool:
        self.now_s += 10.0
        self.given["other"] = min(self.pieces, self.given["other"] + 1)
        return False

    def run(self) -> "Ending":
        """To its end."""
        blobs = SimpleNamespace(received_bytes=0, given_bytes=self.given)
        life, settings = Life(lambda: None), SimpleNamespace(exit_when_done=True)
        membership = SimpleNamespace(
            me=SimpleNamespace(peer_id="me"),
            run=SimpleNamespace(spec=SimpleNamespace(total_steps=5)),
            agreement=SimpleNamespace(view=SimpleNamespace(member_ids=("me", "other"))),
            workload=WORKLOAD,
        )
        participant: Any = SimpleNamespace(
            trainer=SimpleNamespace(done=asyncio.Event()),
            checkpoints=SimpleNamespace(whole_at=self.is_whole, refused=lambda step: False),
            network=SimpleNamespace(blobs=blobs),
            local=SimpleNamespace(settings=settings, life=life),
            membership=membership,
        )
        participant.trainer.done.set()
        asyncio.run(Departure(participant).run_ended())
        return self


def test_who_ends_with_its_run_gives_its_layers_to_the_last_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gigabyte takes a quarter of an hour over a home's line, and all ended after a minute: none
    of them had the whole model."""
    monkeypatch.setattr(coming_and_going, "FETCH_BYTES_PER_S", 100)
    ending = Ending(monkeypatch, 40).run()
    assert ending.given["other"] == 40
    assert 400 + 60 <= ending.now_s <= 400 + 80, "a minute after the last of it"


def test_who_takes_a_byte_now_and_then_keeps_nobody_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ending = Ending(monkeypatch, 10**9).run()
    assert ending.now_s < 120


def test_a_closed_terminal_has_it_leave_in_order_and_nohup_outlives_it() -> None:
    """The shell and the kernel both send a hang-up: two of them are no second Ctrl-C."""

    async def leaves() -> bool:
        life = Life(lambda: None)
        life.handle_signals(until_stdin_closes=False)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        return life.leaving.is_set()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert not asyncio.run(leaves())
        signal.signal(signal.SIGHUP, lambda *_: None)
        assert asyncio.run(leaves())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_home_one_daemon(tmp_path: Path) -> None:
    first, second = Home(tmp_path), Home(tmp_path)
    first.acquire()
    with pytest.raises(UserError, match="already running") as caught:
        second.acquire()
    assert caught.value.exit_code == 3
    first.release()
    second.acquire()
    second.release()


def test_lives_grow_even_if_the_clock_goes_back_or_the_file_is_rubbish(tmp_path: Path) -> None:
    home = Home(tmp_path)
    first = home.next_life()
    assert home.next_life() > first
    (tmp_path / "life.json").write_text(json.dumps({"life": first + 10**9}))
    assert home.next_life() == first + 10**9 + 1
    for rubbish in (b"\xff{", b'{"life": Infinity}', b"[" * 100_000, b'{"life": 1e300}'):
        (tmp_path / "life.json").write_bytes(rubbish)
        assert first <= home.next_life() < LIFE_LIMIT, "nobody would know a peer of a longer one"


def test_what_is_said_to_stand_beside_a_home_may_be_rubbish(tmp_path: Path) -> None:
    for rubbish in (b"\xff{", b"[" * 100_000, b"1"):
        (tmp_path / BESIDE_FILE).write_bytes(rubbish)
        assert Home(tmp_path).of_this_machine() == ()


def test_the_event_log_keeps_a_bounded_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "LIMIT_BYTES", 1000)
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for step in range(200):
        log.write("step", step=step)
    lines = path.read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 199
    kept = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert kept < 2 * 1000 + 200


def test_a_disk_that_refuses_costs_the_line_only(tmp_path: Path) -> None:
    EventLog(tmp_path / "missing" / "events.jsonl").write("step", step=1)


class SetClock:
    """Stands where it is put."""

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns

    def monotonic_ns(self) -> int:
        return self.at_ns

    def wall_ns(self) -> int:
        return self.at_ns

    def block_ns(self, duration_ns: int) -> None:
        self.at_ns += duration_ns


def leaver(view: View) -> Departure:
    """As much of a daemon as decides when to leave at last."""
    participant = SimpleNamespace(
        membership=SimpleNamespace(agreement=SimpleNamespace(view=view)),
        local=SimpleNamespace(life=Life(lambda: None)),
        trainer=SimpleNamespace(leave_views=lambda: None),
    )
    return Departure(participant)  # type: ignore[arg-type]


def test_who_has_the_only_copy_waits_for_a_while_before_it_leaves() -> None:
    """Without a plan no step is made in which anybody could take its layers over."""
    clock = SetClock(100 * SECOND_NS)
    contextvars.copy_context().run(_who_has_the_only_copy_waits, clock)


def _who_has_the_only_copy_waits(clock: SetClock) -> None:
    now.live_by(clock)
    trains = view_of(1, 2)
    stuck = View(trains.snapshot, NoPlan("too little memory"))
    peer = leaver(stuck)
    life, agreement = peer.participant.local.life, peer.participant.membership.agreement

    def left_after(seconds: float) -> bool:
        clock.at_ns += int(seconds * SECOND_NS)
        peer.leave_at_last()
        return life.left.is_set()

    assert not left_after(0) and not left_after(1000), "nobody asked it to leave"
    life.leaving.set()
    assert not left_after(0) and not left_after(coming_and_going.LEAVE_LIMIT_S - 1)
    agreement.view = trains
    assert not left_after(10), "somebody came, and takes the layers over"
    agreement.view = stuck
    assert not left_after(10)
    agreement.view = None  # it has gone over to those that want for what it has
    assert not left_after(10) and left_after(coming_and_going.LEAVE_LIMIT_S + 1)
