"""Copies for guardians that lag, in a run that trains adapters over a frozen model."""

import asyncio
from collections.abc import Callable

from tests.daemon.test_cuts import LAYERS, STEP, End, play, states_at, until

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
