"""A state of which nobody but its donor has spoken is asked about again, as its place begins."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.wire import ConfirmLayers, FollowLayers, LayerOffered, StateDigest
from p2p_dtfm.daemon.state_transfer import witnesses
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from tests.core.planning import name_of
from tests.daemon.test_followers import Blobs, Outlet, state_at
from tests.daemon.trainer_parts import SPEC, settle, trainer_tools, view_of

ME = name_of(3)
HOLDERS = tuple(map(name_of, range(3)))
NOW, NEXT = 7, 8


def replicas(peers: tuple[str, ...]) -> Plan:
    count, total = workload_of(SPEC).layer_count, SPEC.microbatches_per_step
    ends = [total * number // len(peers) for number in range(len(peers) + 1)]
    pipelines = (
        Pipeline((Stage(peer_id, 0, count, 1),), ends[n], ends[n + 1] - ends[n])
        for n, peer_id in enumerate(peers)
    )
    return Plan(tuple(pipelines), (), 1_000_000)


class Line:
    """A messenger that can reach everyone."""

    def __init__(self) -> None:
        self.request: tuple[str, FollowLayers] | None = None
        self.confirms: dict[str, ConfirmLayers] = {}

    async def ask(self, peer_id: str, message: FollowLayers) -> None:
        self.request = peer_id, message

    def tell(self, peer_id: str, message: Any) -> None:
        if isinstance(message, ConfirmLayers):
            self.confirms[peer_id] = message


@pytest.mark.parametrize("told_at", [NOW, NEXT])
def test_a_donors_word_for_a_step_that_others_have_not_come_to_is_asked_about_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_at: int
) -> None:
    """Where steps take long a donor had only to say that a false state is of the next one, with
    which the newcomer's place begins. No gradient had moved it on, so nobody was asked again."""
    monkeypatch.setattr(witnesses, "LIMIT_S", 0.2)
    blobs: Any = Blobs()
    line, state = Line(), TrainerState()
    tools = trainer_tools(tmp_path, ME, line, blobs)
    snapshot = msgspec.structs.replace(view_of(1, 4).snapshot, step=NOW, present=replicas(HOLDERS))
    view = View(snapshot, replicas((*HOLDERS, ME)))
    right = state_at(0, NEXT).file_digest()
    given = state_at(0, NEXT)
    if told_at == NOW:
        given.parameters.add_(1.0)
    payload = bytes(given.to_bytes())
    blob = digest_bytes(payload)

    async def run() -> None:
        followers = Followers(tools, Outlet(), state)

        def say(version: int, digest: bytes) -> None:
            for peer_id, asked in line.confirms.items():
                said = StateDigest(view.id, asked.number, 0, version, digest)
                followers.receive(peer_id, said)

        followers.follow(view, {0})
        await settle()
        assert line.request is not None and len(line.confirms) == 2
        donor, request = line.request
        say(told_at, right if told_at == NEXT else state_at(0, NOW).file_digest())
        offer = LayerOffered(view.id, request.number, 0, NEXT, blob, len(payload))
        followers.receive(donor, offer)
        while blob not in blobs.given:
            await settle()
        blobs.given[blob].set_result(payload)
        while 0 not in state.states:
            await state.wait(1.0)
        state.view, state.step = view, NEXT
        line.confirms.clear()
        asking = asyncio.create_task(followers.unlike(view))
        await settle()
        await asyncio.sleep(0.05)
        assert bool(line.confirms) == (told_at == NOW), "what others have confirmed is right"
        say(NEXT, right)
        assert await asking == ({0} if told_at == NOW else set())
        followers.stop_following()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()
