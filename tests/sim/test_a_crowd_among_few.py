"""A few members let in many at once, and from then on nobody speaks with all."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, WIDE_ABOVE
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from tests.core.liars import are_together, swarm

MEMBERS = list("abcd")
AGREE = ("Gather", "Ready", "Spread")
SAID_LIMIT = 60
"""Messages of each peer, on average, until all are in. Where each spoke with all, these were 81
among 28 peers, and 117 among forty."""


@pytest.mark.parametrize(
    ("count", "asked"), [(24, MEMBERS[:1]), (36, MEMBERS)], ids=["at one door", "at each door"]
)
def test_nobody_speaks_with_all_as_a_crowd_is_let_in(
    count: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds where at first each member knows only a part of the crowd."""
    timing = replace(TIMING, wide_above=WIDE_ABOVE, join_window_ns=SECOND_NS // 2)
    world = swarm(MEMBERS, timing=timing)
    said, send = Counter[str](), AgreementWorld.send

    def counted(world: AgreementWorld, sender: str, goal: str, message: Any) -> None:
        said[type(message).__name__] += 1
        send(world, sender, goal, message)

    monkeypatch.setattr(AgreementWorld, "send", counted)
    crowd = [f"n{number:02}" for number in range(count)]
    for number, name in enumerate(crowd):
        world.add_peer(name)
        world.ask_to_join(name, asked[number % len(asked)])
    world.run_until(lambda: are_together(world, [*MEMBERS, *crowd]), limit_s=60)
    assert sum(said[kind] for kind in AGREE) <= SAID_LIMIT * len([*MEMBERS, *crowd]), said


@pytest.mark.parametrize(("members", "count"), [(4, 14), (8, 10), (4, 24)])
def test_all_are_in_within_seconds(members: int, count: int) -> None:
    """No member alone knew of many newcomers, but all members together did. The attempt turned to
    the overlay in its midst. Newcomers gave it up, and all were in after twenty seconds."""
    timing = replace(TIMING, wide_above=WIDE_ABOVE, join_window_ns=SECOND_NS // 2)
    doors = [f"m{number}" for number in range(members)]
    world = swarm(doors, timing=timing)
    crowd = [f"n{number:02}" for number in range(count)]
    for number, name in enumerate(crowd):
        world.add_peer(name)
        world.ask_to_join(name, doors[number % members])
    world.run_until(lambda: are_together(world, [*doors, *crowd]), limit_s=8)
