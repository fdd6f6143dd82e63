"""Members keep a step's reduced gradients while another member may still need them. Those of their
own layers stay until the step is applied, and those of guarded layers until the next step
commits."""

from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import agreement_of, begun, participant_of
from tests.testbed.test_virtual_guardians_that_ask_again import two_stages_and_a_spare

SEED = 1


def test_who_has_applied_a_step_keeps_no_gradients_of_its_own_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small runs these gradients are nothing, and in large ones a quarter of all memory."""
    run = make_run(tmp_path, 2000, saves_every_steps=1000)
    monkeypatch.setattr(worlds, "compute_plan", two_stages_and_a_spare)
    kept: dict[str, dict[int, list[set[int]]]] = {}
    forget = TrainerState.forget_applied

    def forget_and_look(state: TrainerState, step: int, layers: Any) -> None:
        forget(state, step, layers)
        of_step = [set(held) for (_, at), held in state.reduced.items() if at == step]
        kept.setdefault(str(sorted(layers)), {})[step] = of_step

    monkeypatch.setattr(TrainerState, "forget_applied", forget_and_look)

    async def scene(swarm: Swarm) -> None:
        peers = await begun(swarm, run, "abc")
        await swarm.until(lambda: min(it.step() for it in peers) >= 12, "steps", 60)
        by_peer = {it.name: participant_of(it).trainer._steps.engine for it in peers}
        stages = {name: sorted(it.states) for name, it in by_peer.items() if it is not None}
        assert len(stages) == 2, "two have a stage"
        for name, layers in stages.items():
            assert kept[str(layers)], "steps were applied"
            for step, found in kept[str(layers)].items():
                assert not any(set(layers) & each for each in found), f"{name}, step {step}"
        for peer in peers:
            retained = agreement_of(peer).recovery_evidence.retained
            assert retained is not None
            assert not set(retained.reduced_layers) & set(stages.get(peer.name, ()))
        guardian = next(it for it in peers if it.name not in stages)
        retained = agreement_of(guardian).recovery_evidence.retained
        assert retained is not None and retained.reduced_layers, "who guards keeps them"

    play(SEED, tmp_path / "world", scene)
