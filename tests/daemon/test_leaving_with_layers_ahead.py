"""What a peer saves that leaves while layers for its next place are here."""

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from p2p_dtfm.core.recovery.recovery_evidence import RecoveryEvidence
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.trainer.trainer import Trainer
from tests.daemon.test_endings import in_quick_time
from tests.daemon.test_leaving_with_a_full_disk import leaves_with
from tests.daemon.trainer_parts import QuietOutlet, settle, trainer_tools, view_of


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


def test_states_of_the_other_side_are_not_saved_as_those_of_its_own(tmp_path: Path) -> None:
    """Its side of a split swarm gave way. It knew what its own side had come to by each step, and
    saved the states that it was given under that name, beside layers of its own from before."""

    async def scenario() -> None:
        tools, evidence, disk = trainer_tools(tmp_path), RecoveryEvidence(), Disk()
        for step in range(12):
            evidence.lineage.committed(step, f"{step + 1:064x}")
        trainer = Trainer(tools, QuietOutlet())
        agreement = SimpleNamespace(recovery_evidence=evidence)
        member: Any = SimpleNamespace(trainer=trainer, _agreement=agreement)
        leaves = leaves_with(disk, 2)  # type: ignore[arg-type]
        participant: Any = leaves.participant
        participant.trainer = trainer
        participant.lineage_at = partial(Participant.lineage_at, member)
        view = view_of(9, 2)
        trainer.view_agreed(view, True)
        await settle()
        given: Any = SimpleNamespace(version=12)
        trainer.states[0] = given
        await leaves._save()
        assert not disk.saved
        trainer.take_over(view, 12, None, None)
        await leaves._save()
        assert disk.saved == [(12, {0})], "by now it knows the others' lineage"
        await trainer.close()
        tools.compute.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
