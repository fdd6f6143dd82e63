"""Real daemons in virtual time: a member that computes nothing, and says that it waits, costs the
others seconds. At night `tests/e2e/test_stalls.py` asks the same of processes."""

import asyncio
import logging
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.messages.work import Kind, Lack, Work
from p2p_dtfm.daemon.step.step_engine import StepEngine
from p2p_dtfm.daemon.trainer.step_watch import StepWatch
from p2p_dtfm.testbed.virtual.listening import listening
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import begun

STEPS = 400
STALLS_AT = 12
LIAR = "c"
HOLD_UP_LIMIT_S = 10.0


def here() -> str:
    """The name of the peer whose turn it is; empty for the world's."""
    process = PROCESS.get()
    return "" if process is None else process.peer_name


def stall(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps in which the member stops. It accuses nobody, and says that it waits for the
    others."""
    run, tick, work_of = StepEngine.run, StepWatch.tick, StepWatch.work
    stopped: list[int] = []

    async def stops(self: Any, step: int, **how: Any) -> Any:
        if here() == LIAR and step >= STALLS_AT:
            stopped.append(step)
            await asyncio.get_running_loop().create_future()
        return await run(self, step, **how)

    def says_nothing(self: Any, *given: Any) -> list[Any]:
        return [] if here() == LIAR else tick(self, *given)

    def says_that_it_waits(self: Any, agreement: Any) -> Work | None:
        work = work_of(self, agreement)
        if work is None or here() != LIAR or work.step < STALLS_AT:
            return work
        others = [it for it in agreement.view.member_ids if it != agreement.me.peer_id]
        return Work(work.view, work.step, False, tuple(Lack(it, Kind.PREPARED) for it in others))

    monkeypatch.setattr(StepEngine, "run", stops)
    monkeypatch.setattr(StepWatch, "tick", says_nothing)
    monkeypatch.setattr(StepWatch, "work", says_that_it_waits)
    return stopped


class Rejoins(logging.Handler):
    """How often each peer has lost its place."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts = defaultdict[str, int](int)

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("rejoins: "):
            self.counts[here()] += 1


def gaps_s(peer: Peer) -> list[float]:
    """Seconds between commits, from the last one before the stall on."""
    times = [
        it["at_s"] for it in peer.events() if it["event"] == "step" if it["step"] >= STALLS_AT - 1
    ]
    return [after - before for before, after in pairwise(times)]


def test_who_stalls_is_out_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, rejoins = make_run(tmp_path, STEPS, saves_every_steps=1000), Rejoins()
    stopped = stall(monkeypatch)

    async def scene(swarm: Swarm) -> None:
        peers = await begun(swarm, run, f"ab{LIAR}")
        rest = peers[:-1]
        await swarm.until(lambda: min(it.step() for it in rest) > 2 * STALLS_AT, "they go on", 120)
        assert stopped and rejoins.counts.keys() == {LIAR}, (stopped, rejoins.counts)
        for peer in rest:
            assert 1.0 < max(gaps_s(peer)) <= HOLD_UP_LIMIT_S, gaps_s(peer)

    with listening(rejoins, logging.WARNING):
        play(1, tmp_path / "world", scene)
