"""Numbers that are not finite are refused where they arrive, and their sender is named."""

import asyncio
import math
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from p2p_dtfm.daemon.step.pipeline import microbatches, stage_boundary
from p2p_dtfm.daemon.step.reduction import segment_exchange
from p2p_dtfm.train.kernels import processor
from p2p_dtfm.train.stage import finite, segment_reduction
from p2p_dtfm.train.stage.finite import NotFinite, is_finite, is_within
from tests.core.builders import run_spec
from tests.e2e.swarm_in_process import EnginePeer, engine_peers, prepare_engines, run_all
from tests.e2e.test_parity import even_plan, synthetic_batch

DEADLINE_S = 30.0
SPEC = run_spec()


@pytest.mark.parametrize("shape", [(2,), (1, 1)], ids=["stages", "replicas"])
def test_who_sends_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """The first peer does not check what it makes, as a liar would not."""
    torch.set_num_threads(1)

    async def run() -> None:
        async with engine_peers(2, tmp_path, SPEC) as peers:
            plan = even_plan([peer.host.peer_id for peer in peers], shape, SPEC)
            prepare_engines(peers, plan, SPEC, synthetic_batch(SPEC))
            liar, honest = peers
            await poison(liar, monkeypatch)
            running = asyncio.create_task(run_all(peers, 0))
            try:
                async with asyncio.timeout(DEADLINE_S):
                    while not honest.faults:
                        assert not running.done(), running
                        await asyncio.sleep(0.02)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            (fault, *_) = honest.faults
            assert fault.peer_id == liar.host.peer_id and "not finite" in fault.cause

    asyncio.run(run())


async def poison(peer: EnginePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison the peer's parameters, and so all that it sends; its own threads find nothing
    wrong."""
    assert peer.engine is not None
    for state in peer.engine.states.values():
        state.parameters.fill_(float("nan"))
    mine = {
        await peer.compute.run(threading.get_ident),
        await peer.compute.run_beside(threading.get_ident),
    }

    def unless_mine(honest: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *values: threading.get_ident() in mine or honest(*values)

    monkeypatch.setattr(segment_exchange, "SHORT_BYTES", -1)  # no sum in the loop both share
    monkeypatch.setattr(processor, "serves", lambda device: False)  # kernels look for themselves
    for module in (finite, segment_reduction):
        monkeypatch.setattr(module, "is_finite", unless_mine(is_finite))
    monkeypatch.setattr(stage_boundary, "is_within", unless_mine(is_within))
    monkeypatch.setattr(microbatches.math, "isfinite", unless_mine(math.isfinite))


def test_what_this_peer_makes_of_finite_numbers_is_not_sent(tmp_path: Path) -> None:
    torch.set_num_threads(1)

    async def run() -> None:
        async with engine_peers(1, tmp_path, SPEC) as peers:
            plan = even_plan([peers[0].host.peer_id], (1,), SPEC)
            prepare_engines(peers, plan, SPEC, synthetic_batch(SPEC))
            assert peers[0].engine is not None
            for state in peers[0].engine.states.values():
                state.parameters.fill_(1e30)
            with pytest.raises(NotFinite):
                await run_all(peers, 0)

    asyncio.run(run())
