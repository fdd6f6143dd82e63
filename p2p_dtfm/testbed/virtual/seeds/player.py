"""Plays seeds one after the other."""

import gc
import tempfile
from pathlib import Path

from p2p_dtfm.testbed.virtual.seeds.judge import Reference
from p2p_dtfm.testbed.virtual.seeds.one_seed import Played, play_seed
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
from p2p_dtfm.testbed.virtual.seeds.schedules.draw import draw
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import CALM_STEPS, QUICK_STEPS, Schedule
from p2p_dtfm.testbed.virtual.swarm import set_aside_for_good

COLLECTED_AFTER = 50_000
"""How many new objects there are before the collector looks."""
SHORT_STEPS = 24
"""Audits are half of a seed with liars, and each second of a crowd costs much: such runs are short.
A crowd's run is long enough for the crowd to be let in, and for a part of it to go."""
FOLLOW_STEPS = 5
"""In a run with liars a newcomer so gets states and a stage before the end."""


class Player:
    """Plays seeds of a few runs, each in a folder of its own, which is deleted afterwards."""

    def __init__(self, scratch: Path, steps: int = STEPS) -> None:
        self._scratch = scratch
        self._steps = steps
        self._runs: dict[tuple[str, int], tuple[Path, Reference]] = {}
        """Runs by model and steps, made when a seed first needs one, with what a single process
        makes of each."""
        self._run_of("", steps)

    def play(self, seed: int, schedule: Schedule | None = None) -> Played:
        schedule = schedule or draw(seed)
        steps = self._steps
        if (schedule.liars or schedule.is_quick) and not schedule.is_long:
            quick = CALM_STEPS if schedule.is_calm else QUICK_STEPS
            is_short = schedule.liars or schedule.is_crowd
            steps = min(steps, SHORT_STEPS if is_short else quick)
        run, reference = self._run_of(schedule.model, steps)
        if schedule.liars:
            run = with_audits(run, schedule.audit_rate, FOLLOW_STEPS)
        elif schedule.is_audited:
            run = with_audits(run, schedule.audit_rate)
        with tempfile.TemporaryDirectory(dir=memory_disk()) as home:
            return play_seed(seed, schedule, run, Path(home), reference)

    def _run_of(self, model: str, steps: int) -> tuple[Path, Reference]:
        if (model, steps) not in self._runs:
            if not model:
                folder = self._scratch / f"{steps}"
                folder.mkdir()
                run = make_run(folder, steps)
            else:
                change = with_recipe if model in RECIPES else with_given_weights
                run = change(self._run_of("", steps)[0], model)
            self._runs[model, steps] = (run, self._reference_of(run, model, steps))
        return self._runs[model, steps]

    def _reference_of(self, run: Path, model: str, steps: int) -> Reference:
        if model in RECIPES and model not in LIKE_ONE:
            return unlike_one(run)
        return reference_of(run, self._scratch / f"reference-{steps}-{model}")


def leave_alone_what_is_loaded() -> None:
    """No collection looks through the hundred thousands of objects that imports leave. A seed's own
    objects are seldom looked through before they go with its world."""
    set_aside_for_good()
    gc.set_threshold(COLLECTED_AFTER, 20, 10)


def memory_disk() -> str | None:
    """Where homes cost no waiting for a disk; None: nowhere."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
