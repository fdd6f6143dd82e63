"""Never more is under way than there is room for, and every waiter gets a turn."""

import asyncio

import pytest

from p2p_dtfm.daemon.machine.byte_semaphore import ByteSemaphore
from tests.daemon.trainer_parts import settle


def test_items_and_bytes_are_bounded() -> None:
    async def scenario() -> None:
        room, inside = ByteSemaphore(2, 100), []
        ends = {name: asyncio.Event() for name in "abcd"}

        async def hold(name: str, size_bytes: int) -> None:
            async with room.taken(size_bytes):
                inside.append(name)
                await ends[name].wait()
            inside.remove(name)

        large = asyncio.create_task(hold("a", 1000))
        await settle()
        others = [
            asyncio.create_task(hold(name, size))
            for name, size in zip("bcd", (60, 60, 30), strict=True)
        ]
        await settle()
        assert inside == ["a"], "larger than all room, and alone"
        ends["a"].set()
        await large
        await settle()
        assert inside == ["b", "d"], "c does not fit beside b"
        others[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await others[0]
        await settle()
        assert "c" in inside, "who is cancelled leaves its room"
        for end in ends.values():
            end.set()
        await asyncio.gather(*others[1:])

    asyncio.run(asyncio.wait_for(scenario(), 10))
