"""A layer's gradient travels while the layers below it are still computed, and nothing is lost."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.schedule import pieces
from p2p_dtfm.net.streams.frames import FrameKind
from tests.core.builders import run_spec
from tests.e2e.swarm_in_process import EnginePeer, engine_peers, prepare_engines, run_all
from tests.e2e.test_parity import even_plan, synthetic_batch

PART_WAIT_S = 3.0
"""How long the lowest layer waits for a part of the layers above to go out. A part never goes out
where reduction begins only after the backward."""


def watched(peer: EnginePeer, events: list[tuple[str, int]], last: int) -> None:
    """Note each layer's last gradient, and each part of a sum that is sent. `last` is the last
    microbatch of the peer's pipeline."""
    engine = peer.engine
    assert engine is not None
    lowest, is_sent = min(engine.states), threading.Event()
    runner, send_later = engine._runner, engine.frames.send_later

    def noting(name, function):
        def call(microbatch, layer, *args):
            if (microbatch, layer) == (last, lowest):
                is_sent.wait(PART_WAIT_S)
            result = function(microbatch, layer, *args)
            events.append((name, layer))
            return result

        return call

    def send(peer_id, lane, header, payload):
        if header.kind is FrameKind.GRADIENT_PART:
            events.append(("part", header.index))
            is_sent.set()
        send_later(peer_id, lane, header, payload)

    runner.backward_layer = noting("gradient", runner.backward_layer)
    runner.weight_backward_layer = noting("gradient", runner.weight_backward_layer)
    engine.frames.send_later = send


@pytest.mark.parametrize("stage_counts", [(1, 1), (2, 2)], ids=str)
def test_parts_are_sent_before_the_last_gradient_is_final(
    stage_counts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS_EACH", 16)
    spec = run_spec()
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"layers": 12})})

    async def run() -> None:
        async with engine_peers(sum(stage_counts), tmp_path, spec) as peers:
            plan = even_plan([peer.host.peer_id for peer in peers], stage_counts, spec)
            prepare_engines(peers, plan, spec, synthetic_batch(spec))
            seen: list[list[tuple[str, int]]] = [[] for _ in peers]
            for peer, events in zip(peers, seen, strict=True):
                place = plan.place_of(peer.host.peer_id)
                assert place is not None
                watched(peer, events, plan.pipelines[place[0]].microbatches[-1])
            await run_all(peers, 0)
            for peer, events in zip(peers, seen, strict=True):
                engine = peer.engine
                layers = list(engine.states)
                finals = {layer: _last(events, ("gradient", layer)) for layer in layers}
                assert sorted(finals.values(), reverse=True) == list(finals.values())
                first_part = next(n for n, (name, _) in enumerate(events) if name == "part")
                assert finals[layers[-1]] < first_part < finals[layers[0]], events
                own = {n: state.gradient_vector() for n, state in engine.states.items()}
                assert all(gradient.any() for gradient in own.values())
                assert all(
                    not torch.equal(own[layer], engine.reduced[layer]) for layer in layers
                ), "a peer's own sums stay beside the reduced ones"
            by_layer: dict[int, list[torch.Tensor]] = {}
            for peer in peers:
                for layer, gradient in peer.engine.reduced.items():
                    by_layer.setdefault(layer, []).append(gradient)
            for held in by_layer.values():
                assert len(held) == 2 and torch.equal(held[0], held[1])

    asyncio.run(run())


@pytest.mark.parametrize("in_flight", [1, 2])
def test_no_stage_holds_more_than_planned_and_recomputing_changes_nothing(
    in_flight: int, tmp_path: Path
) -> None:
    """Three stages; a second step of the middle one is computed with recomputation."""
    torch.set_num_threads(1)
    spec = run_spec()

    async def run() -> None:
        async with engine_peers(3, tmp_path, spec) as peers:
            plan = even_plan([peer.host.peer_id for peer in peers], (3,), spec)
            stages = tuple(
                msgspec.structs.replace(stage, in_flight=in_flight)
                for stage in plan.pipelines[0].stages
            )
            plan = Plan((msgspec.structs.replace(plan.pipelines[0], stages=stages),), (), 0)
            sums = []
            for recompute in (False, True):
                prepare_engines(peers, plan, spec, synthetic_batch(spec), recompute)
                most = [_most_held(peer) for peer in peers]
                await run_all(peers, 0)
                held = [each() for each in most]
                assert held[0] == in_flight and max(held) <= in_flight
                sums.append([p.engine.reduced[n] for p in peers for n in sorted(p.engine.reduced)])
            for kept, again in zip(*sums, strict=True):
                assert torch.equal(kept, again)

    asyncio.run(run())


def _most_held(peer: EnginePeer) -> Callable[[], int]:
    assert peer.engine is not None
    runner, seen = peer.engine._runner, [0]
    forward = runner.forward

    def counting(*args):
        result = forward(*args)
        seen[0] = max(seen[0], runner.in_flight)
        return result

    runner.forward = counting
    return lambda: seen[0]


def _last(events: list[tuple[str, int]], event: tuple[str, int]) -> int:
    return max(number for number, seen in enumerate(events) if seen == event)
