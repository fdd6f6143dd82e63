"""What happens to a swarm of real daemons, and when: a function of a seed.

A fault names the committed step at which it is due, and how long it lasts. It stays within what the
project promises to survive. A peer is killed only while all others are well (`is_careful`). So each
layer keeps a holder or a guardian, and enough peers stay for a plan.
"""

import random
from dataclasses import dataclass

FIRST_STEP = 8
STEPS_BETWEEN = 10
LEAVES_LIMIT = 2
JOINS_LIMIT = 4
WEIGHTS = {
    "kill": 4,
    "pause": 3,
    "slow": 2,
    "cut": 2,
    "partition": 1,
    "degrade": 2,
    "corrupt": 2,
    "join": 1,
    "leave": 1,
    "disk full": 2,
}
KINDS = tuple(WEIGHTS)
SECONDS = {
    "kill": (3.0, 8.0),
    "pause": (7.0, 12.0),
    "slow": (5.0, 10.0),
    "cut": (7.0, 10.0),
    "partition": (8.0, 12.0),
    "degrade": (5.0, 10.0),
    "disk full": (4.0, 8.0),
}
"""How long each kind lasts. A killed peer starts again after that."""


@dataclass(frozen=True)
class ChaosFault:
    """`peers` are those it happens to: the two ends of a cut, or one side of a partition."""

    at_step: int
    kind: str
    peers: tuple[str, ...]
    lasts_s: float | None
    """None: for good."""
    lasts_steps: int = 0
    """If given, the fault is over when so many steps are committed, or when its seconds are."""
    factor: float = 1.0
    """How many times slower a slowed peer or a degraded link gets; 1: as usual for this kind."""

    @property
    def is_careful(self) -> bool:
        """Whether it waits until nothing else is wrong: otherwise state would be lost for good."""
        return self.kind in ("kill", "leave", "partition", "pause", "cut")


def chaos_schedule(peers: tuple[str, ...], seed: int, faults: int) -> tuple[ChaosFault, ...]:
    """`faults` faults for a swarm that begins with `peers`; newcomers are named `newcomer-N`."""
    chance = random.Random(seed)
    present = list(peers)
    joins = leaves = 0
    schedule = []
    for number in range(faults):
        kind = chance.choices(KINDS, [WEIGHTS[kind] for kind in KINDS])[0]
        if kind == "leave" and (leaves >= LEAVES_LIMIT or len(present) <= 3):
            kind = "slow"
        if kind == "join" and joins >= JOINS_LIMIT:
            kind = "corrupt"
        lasts_s = round(chance.uniform(*SECONDS[kind]), 1) if kind in SECONDS else 0.0
        if kind == "join":
            joins += 1
            victims = [f"newcomer-{joins}"]
            present += victims
        else:
            victims = sorted(chance.sample(present, _count(kind, len(present), chance)))
        if kind == "leave":
            leaves += 1
            present.remove(victims[0])
        at_step = FIRST_STEP + STEPS_BETWEEN * number + chance.randrange(STEPS_BETWEEN // 2)
        schedule.append(ChaosFault(at_step, kind, tuple(victims), lasts_s))
    return tuple(schedule)


def _count(kind: str, present: int, chance: random.Random) -> int:
    if kind == "partition":
        return chance.randrange(1, present // 2 + 1)
    return min(2, present) if kind in ("cut", "corrupt") else 1
