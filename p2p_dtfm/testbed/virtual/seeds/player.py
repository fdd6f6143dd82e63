"""Plays seeds one after the other, of one run."""

import gc
import tempfile
from pathlib import Path

from p2p_dtfm.testbed.virtual.seeds.faults import Schedule, draw
from p2p_dtfm.testbed.virtual.seeds.judge import Reference
from p2p_dtfm.testbed.virtual.seeds.playing import Played, play_seed
from p2p_dtfm.testbed.virtual.seeds.run import (
    LIKE_ONE,
    RECIPES,
    STEPS,
    make_run,
    reference_of,
    unlike_one,
    with_audits,
    with_given_weights,
    with_recipe,
)

COLLECTED_AFTER = 50_000
"""New objects."""
LIES = "lies"
STEPS_WITH_LIES = 24
"""Audits are half of such a seed: it has to be a short one."""
FOLLOW_STEPS = 5
"""Where some lie: so that who comes gets states, and a stage, within the run."""


class Player:
    """Plays seeds of a few runs, each in a folder of its own that goes afterwards."""

    def __init__(self, scratch: Path, steps: int = STEPS) -> None:
        self._scratch = scratch
        run = make_run(scratch, steps)
        self._runs: dict[str, tuple[Path, Reference]] = {}
        """By the model that is trained, once a seed does: with what one process makes of it."""
        self._runs[""] = (run, reference_of(run, scratch / "reference"))
        self._steps = steps

    def play(self, seed: int, schedule: Schedule | None = None) -> Played:
        schedule = schedule or draw(seed)
        run, reference = self._run_of(LIES if schedule.liars else schedule.model)
        if schedule.liars:
            run = with_audits(run, schedule.audit_rate, FOLLOW_STEPS)
        elif schedule.is_audited:
            run = with_audits(run, schedule.audit_rate)
        with tempfile.TemporaryDirectory(dir=memory_disk()) as home:
            return play_seed(seed, schedule, run, Path(home), reference)

    def _run_of(self, model: str) -> tuple[Path, Reference]:
        if model not in self._runs:
            if model == LIES:
                folder = self._scratch / LIES
                folder.mkdir()
                run = make_run(folder, min(self._steps, STEPS_WITH_LIES))
            elif model in RECIPES:
                run = with_recipe(self._runs[""][0], model)
            else:
                run = with_given_weights(self._runs[""][0], model)
            self._runs[model] = (run, self._reference_of(run, model))
        return self._runs[model]

    def _reference_of(self, run: Path, model: str) -> Reference:
        if model in RECIPES and model not in LIKE_ONE:
            return unlike_one(self._steps)
        return reference_of(run, self._scratch / f"reference-{model}")


def leave_alone_what_is_loaded() -> None:
    """The hundred thousands of objects that imports leave are looked through in no collection; and
    a seed's own, which are gone when its world ends, seldom before."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER, 20, 10)


def memory_disk() -> str | None:
    """Where homes cost no waiting for a disk, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
