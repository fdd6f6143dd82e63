"""A peer that is told to leave while it is in no view of the others' does not come back to them
first."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.consensus.actions import Rejoin
from p2p_dtfm.daemon.machine.life import Life
from p2p_dtfm.daemon.node.effects import Effects

PAUSE_NS = 60_000_000_000


class Outside:
    """The parts of a daemon that was thrown out; `did` is what became of it."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.life = Life(lambda: None)

        async def join() -> None:
            self.did.append("joins")

        trainer = SimpleNamespace(stop_step=lambda: None, leave_views=lambda: None)
        local = SimpleNamespace(
            life=self.life,
            home=SimpleNamespace(next_life=lambda: 2),
            observer=SimpleNamespace(left_views=lambda: None),
            status=SimpleNamespace(
                say=lambda state, what: None, troubles=SimpleNamespace(over=lambda name: None)
            ),
        )
        history = SimpleNamespace(keep=lambda *of: None, write=lambda: None)
        participant: Any = SimpleNamespace(
            membership=SimpleNamespace(
                actions=SimpleNamespace(handle=lambda handlers: None),
                agreement=SimpleNamespace(history=(), bars=(), signatures=()),
                view_history=history,
                begin_life=lambda life: self.did.append("begins a life"),
            ),
            local=local,
            network=SimpleNamespace(messenger=None),
            trainer=trainer,
        )
        entry: Any = SimpleNamespace(join=join)
        departure: Any = SimpleNamespace(leave_now=lambda: self.did.append("leaves"))
        self.effects = Effects(participant, entry, departure)


@pytest.mark.parametrize("is_needed", [False, True])
def test_who_is_told_to_leave_while_it_waits_to_come_back_leaves(is_needed: bool) -> None:
    """The peer began another life, and asked to be let in. It has to come back only where the
    others want what it has; then it leaves as anybody does."""

    async def scene() -> list[str]:
        peer = Outside()
        action = Rejoin("x", pause_ns=PAUSE_NS, is_needed=is_needed)
        coming_back = asyncio.create_task(peer.effects._rejoin(action))
        await asyncio.sleep(0.05)
        assert not peer.did
        peer.life.leaving.set()
        await asyncio.wait_for(coming_back, 10)
        return peer.did

    comes_back = ["begins a life", "joins"]
    assert asyncio.run(scene()) == (comes_back if is_needed else ["leaves"])
