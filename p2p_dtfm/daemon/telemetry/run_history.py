"""What is known of the run's committed steps: losses, rate, and how long the rest will take."""

from collections import deque
from collections.abc import Callable

from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.daemon.telemetry.step_rate import StepRate

LOSSES_KEPT = 4096


class RunHistory:
    """`on_record` is called for every committed step, once in each lineage."""

    def __init__(self, spec: RunSpec, status: Status) -> None:
        self.losses: deque[tuple[int, float]] = deque(maxlen=LOSSES_KEPT)
        self.held_out: deque[tuple[int, float]] = deque(maxlen=LOSSES_KEPT)
        self.on_record: Callable[[StepOutcome], None] | None = None
        self.pace = StepRate(status.clock_s)
        self._spec = spec
        self._status = status
        self._recorded_step = -1
        self._from_step = 0
        """The present view's first step."""
        status.facts["total_steps"] = spec.total_steps
        status.measured = self._measured

    def told_before(self, step: int) -> None:
        """An earlier life of this home has told of the steps up to this one. A peer that comes back
        and rolls the last one forward has nothing new to tell."""
        self._recorded_step = step

    def goes_on_from(self, step: int) -> None:
        """A view starts here: steps that it repeats are recorded again."""
        self._recorded_step = min(self._recorded_step, step - 1)
        self._status.facts |= {
            "step": min(step, self._spec.total_steps),
            "loss": _newest_before(step, self.losses),
            "held_out_loss": _newest_before(step + 1, self.held_out),
        }
        self._from_step = step
        self.pace.begins()

    def left_views(self) -> None:
        """The others' steps go on, or none do: how fast, and until when, is not seen from here."""
        self.pace.ends()

    def takes_back(self, step: int) -> None:
        """What was committed from `step` on is taken back, as it rests on a liar's work: it goes
        from the curves."""
        for curve in (self.losses, self.held_out):
            while curve and curve[-1][0] >= step:
                curve.pop()

    def record(self, outcome: StepOutcome) -> None:
        """A step is committed; it counts once."""
        if outcome.step <= self._recorded_step:
            return
        self._recorded_step = outcome.step
        if outcome.loss is not None:
            self.losses.append((outcome.step, outcome.loss))
            if outcome.step >= self._from_step:  # else it is the last one of the view before
                self.pace.committed()
        if outcome.held_out_loss is not None:
            self.held_out.append((outcome.step, outcome.held_out_loss))
        self._status.facts |= {
            "step": min(outcome.step + 1, self._spec.total_steps),
            "loss": self.losses[-1][1] if self.losses else None,
            "held_out_loss": self.held_out[-1][1] if self.held_out else None,
        }
        if self._status.state is State.TRAINING:
            self._status.say(State.TRAINING, self._of_all(outcome.step + 1))
        if self.on_record is not None:
            self.on_record(outcome)

    def _of_all(self, step: int) -> str:
        total = self._spec.total_steps
        return f"step {min(step, total):,} of {total:,}"

    def _measured(self) -> dict[str, object]:
        """Rate and time left, as they are at this moment."""
        left = self._spec.total_steps - int(self._status.facts.get("step") or 0)
        rate = self.pace.steps_per_s() if left > 0 else None
        return {
            "tokens_per_s": round(rate * self._spec.tokens_per_step, 1) if rate else None,
            "eta_s": round(left / rate, 1) if rate else None,
        }


def _newest_before(step: int, curve: deque[tuple[int, float]]) -> float | None:
    """The newest value of a step that is committed before this one; of lost steps nothing is
    told."""
    return next((value for at, value in reversed(curve) if at < step), None)
