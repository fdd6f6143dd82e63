"""A peer that leaves while layers for its next place are further than its own."""

from types import SimpleNamespace
from typing import Any

from tests.daemon.test_endings import in_quick_time
from tests.daemon.test_leaving_with_a_full_disk import leaves_with


class Disk:
    whole_step = 100

    def __init__(self) -> None:
        self.saved: list[tuple[int, set[int]]] = []

    async def save(self, step: int, states: dict[int, Any], lineage: str) -> None:
        assert lineage, "no state is saved of which nobody knows what it comes from"
        self.saved.append((step, set(states)))

    def refused(self, step: int) -> bool:
        return False


def test_its_own_layers_are_saved_though_others_have_gone_further() -> None:
    """A donor tells of a step's commit before this peer has seen it, or lies about it. Of the step
    of that layer no lineage is known here, so nothing at all was saved."""
    disk: Any = Disk()
    leaves = leaves_with(disk, 2)
    participant: Any = leaves.participant
    participant.trainer.states[1] = SimpleNamespace(version=140)
    participant.trainer.states[2] = SimpleNamespace(version=141)
    participant.lineage_at = lambda step: "lineage" if step <= 140 else ""
    in_quick_time(lambda passes: leaves.end())
    assert disk.saved == [(140, {0, 1})]
    participant.lineage_at = lambda step: ""
    in_quick_time(lambda passes: leaves.end())
    assert len(disk.saved) == 1
