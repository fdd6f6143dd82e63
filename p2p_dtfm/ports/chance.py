"""Chance as a daemon sees it: this machine's, or drawn from the seed of the world it runs in.

Only for what may be anything: who is tried first, what a new run is marked with; and for what
nobody may guess but is over within two steps, as openings of audits are: on a machine that is the
operating system's chance. Keys and tokens come from there in every world.
"""

import random
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")

_CHANCE: ContextVar[random.Random] = ContextVar("chance", default=random.SystemRandom())  # noqa: B039


def live_by(chance: random.Random) -> None:
    """From here on in this task, and in all that it begins."""
    _CHANCE.set(chance)


def sample(items: Sequence[Item], count: int) -> list[Item]:
    """That many of them, in any order."""
    return _CHANCE.get().sample(items, count)


def token_bytes(count: int) -> bytes:
    """That many, which nobody guesses who does not know the seed of a world."""
    return _CHANCE.get().randbytes(count)
