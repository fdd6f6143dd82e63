"""Copies for guardians that lag: what has to be here, and right, before they say that they have
them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from tests.daemon.test_cuts import HOLDER, LAYERS, STEP, End, play, states_at, until

__all__ = ["play"]


def test_a_guardian_has_what_is_frozen_before_it_says_that_it_has_a_copy(
    play: Callable[..., None],
) -> None:
    """Adapters are small, and come long before the frozen layers. Were their holder to die
    meanwhile, nobody could compute with them, though all had been told that the step is safe."""

    async def scenario(holder: End, guardian: End) -> None:
        frozen, asked = asyncio.Event(), set[int]()

        async def keep(layer: int) -> None:
            asked.add(layer)
            await frozen.wait()

        guardian.cuts._tools.stores.initial.keep = keep  # type: ignore[method-assign]
        holder.cuts.begin(STEP, states_at(STEP))
        await until(lambda: len(guardian.cuts._checking) == LAYERS)
        await asyncio.sleep(0.2)
        assert holder.cuts.kept == -1 and not guardian.outlet.cuts
        assert asked == set(range(LAYERS))
        frozen.set()
        await until(lambda: holder.cuts.kept == STEP)
        assert [it.layers for it in guardian.outlet.cuts] == [tuple(range(LAYERS))]

    play(scenario)


def test_a_copy_with_a_value_that_is_no_number_is_refused(play: Callable[..., None]) -> None:
    """Its holder had only to go. The guardian went on from that copy, and the whole run stood
    still, as one that has diverged."""

    async def scenario(holder: End, guardian: End) -> None:
        sent: list[Any] = []
        line: Any = holder.cuts._tools.net.bulk
        line.deliver = lambda sender, header, payload: (
            payload is None or sent.append((header, payload))
        )
        states = states_at(STEP)
        for state in states.values():
            state.second_moments[0] = float("nan")
        holder.cuts.begin(STEP, states)
        await until(lambda: len({header.layer for header, _ in sent}) == LAYERS)
        with pytest.raises(PeerFault, match="not finite"):
            for header, payload in sent:
                guardian.cuts.frame(HOLDER, header, payload)

    play(scenario)
