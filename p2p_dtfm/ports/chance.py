"""Chance as a daemon sees it: this machine's, or drawn from the seed of the world it runs in.

It serves choices that may come out in any way: which peer is tried first, the mark of a new run. It
also serves secrets that are over within two steps, such as openings of audits: on a machine, chance
is the operating system's. Keys and lasting tokens come from the operating system in every world.
"""

import random
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")

_CHANCE: ContextVar[random.Random] = ContextVar("chance", default=random.SystemRandom())  # noqa: B039


def live_by(chance: random.Random) -> None:
    """Use this chance from here on in this task, and in all tasks that it begins."""
    _CHANCE.set(chance)


def sample(items: Sequence[Item], count: int) -> list[Item]:
    """`count` of the items, in any order."""
    return _CHANCE.get().sample(items, count)


def token_bytes(count: int) -> bytes:
    """`count` bytes that nobody can guess without the seed of the world."""
    return _CHANCE.get().randbytes(count)
