"""What is known of the run's committed steps: losses, rate, and how long the rest will take."""

import time
from collections import deque
from collections.abc import Callable

from p2p_dtfm.core.run_spec import RunSpec
from p2p_dtfm.core.step import StepOutcome
from p2p_dtfm.daemon.status import Status

LOSSES_KEPT = 4096
RATE_STEPS = 20


class RunHistory:
    """`on_record` is called for every committed step, once in each lineage."""

    def __init__(self, spec: RunSpec, status: Status) -> None:
        self.losses: deque[tuple[int, float]] = deque(maxlen=LOSSES_KEPT)
        self.held_out: deque[tuple[int, float]] = deque(maxlen=LOSSES_KEPT)
        self.on_record: Callable[[StepOutcome], None] | None = None
        self._spec = spec
        self._status = status
        self._recorded_step = -1
        self._step_ends: deque[float] = deque(maxlen=RATE_STEPS + 1)

    def goes_on_from(self, step: int) -> None:
        """A view starts here: steps that it repeats are recorded again."""
        self._recorded_step = min(self._recorded_step, step - 1)

    def record(self, outcome: StepOutcome, next_step: int) -> None:
        """A step is committed; it counts once."""
        if outcome.step <= self._recorded_step:
            return
        self._recorded_step = outcome.step
        if outcome.loss is not None:
            self.losses.append((outcome.step, outcome.loss))
            self._step_ends.append(time.monotonic())
        if outcome.held_out_loss is not None:
            self.held_out.append((outcome.step, outcome.held_out_loss))
        self._status.facts |= self._facts(next_step)
        if self.on_record is not None:
            self.on_record(outcome)

    def _facts(self, step: int) -> dict[str, object]:
        """Losses, rate and ETA for the status."""
        total = self._spec.total_steps
        rate = self._steps_per_s()
        left = max(0, total - step)
        return {
            "step": min(step + 1, total) if self.losses else step,
            "total_steps": total,
            "loss": self.losses[-1][1] if self.losses else None,
            "held_out_loss": self.held_out[-1][1] if self.held_out else None,
            "tokens_per_s": round(rate * self._spec.tokens_per_step, 1) if rate else None,
            "eta_s": round(left / rate, 1) if rate else None,
        }

    def _steps_per_s(self) -> float | None:
        if len(self._step_ends) < 2:
            return None
        return (len(self._step_ends) - 1) / (self._step_ends[-1] - self._step_ends[0])
