"""Two directions of one connection."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_one_ends(*ways: Coroutine[Any, Any, None]) -> None:
    """Carry bytes both ways, and cut the other way when one has ended."""
    both = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
