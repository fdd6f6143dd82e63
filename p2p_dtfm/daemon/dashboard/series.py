"""The figures of a run over its steps, in bounded room: a long run keeps evenly spaced steps."""

from collections import deque
from math import gcd

from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.web.state import History

POINTS_LIMIT = 2000
"""Of a column; at the limit every second point goes, and only every second step is taken."""
VIEWS_LIMIT = 256


class Series:
    """`history()` returns the same object until something is added."""

    def __init__(self, points_limit: int = POINTS_LIMIT) -> None:
        assert points_limit >= 2
        self._limit = points_limit
        self._stride = 1
        self._generation = 0
        self._steps: list[tuple[int, float, float | None]] = []
        self._held_out: list[tuple[int, float]] = []
        self._views: deque[int] = deque(maxlen=VIEWS_LIMIT)
        self._made: History | None = History()

    def committed(self, outcome: StepOutcome, tokens_per_s: float | None) -> None:
        """Take a step's outcome. A step that was repeated replaces what came of it before."""
        if self._newest_step >= outcome.step:
            self._forget_from(outcome.step, outcome.step)
        if outcome.loss is not None and outcome.step % self._stride == 0:
            self._steps.append((outcome.step, outcome.loss, tokens_per_s))
            if len(self._steps) >= self._limit:
                self._stride *= 2
                self._steps = [point for point in self._steps if point[0] % self._stride == 0]
                self._generation += 1
        if outcome.held_out_loss is not None:
            self._held_out.append((outcome.step, outcome.held_out_loss))
            if len(self._held_out) >= self._limit:
                self._held_out = self._held_out[::2]
                self._generation += 1
        self._made = None

    @property
    def _newest_step(self) -> int:
        ends = (self._steps[-1:], self._held_out[-1:])
        return max((end[0][0] for end in ends if end), default=-1)

    def _forget_from(self, step: int, held_out_step: int) -> None:
        self._steps = [point for point in self._steps if point[0] < step]
        self._held_out = [point for point in self._held_out if point[0] < held_out_step]
        self._generation += 1

    def take_up(self, history: History) -> None:
        """Go on with what another process had of the same run."""
        columns = zip(history.step, history.loss, history.tokens_per_s, strict=True)
        self._steps = list(columns)
        self._held_out = list(zip(history.held_out_step, history.held_out_loss, strict=True))
        self._views = deque(history.view_step, maxlen=VIEWS_LIMIT)
        # not the gap to the next: a peer that paused lacks the steps that came meanwhile
        common = gcd(*history.step) if len(self._steps) >= self._limit // 2 else 1
        self._stride = max(1, common)
        self._generation = history.generation + 1
        self._made = None

    def view_took_over(self, step: int) -> None:
        """A view holds from this step on. What was committed of it and of later ones before is lost
        or taken back. The held-out loss at the step is of the model that the view begins with."""
        if self._newest_step >= step:
            self._forget_from(step, step + 1)
        if len(self._views) == VIEWS_LIMIT:
            self._generation += 1
        self._views.append(step)
        self._made = None

    def history(self) -> History:
        if self._made is None:
            self._made = History(
                generation=self._generation,
                step=tuple(step for step, _, _ in self._steps),
                loss=tuple(loss for _, loss, _ in self._steps),
                tokens_per_s=tuple(rate for _, _, rate in self._steps),
                held_out_step=tuple(step for step, _ in self._held_out),
                held_out_loss=tuple(loss for _, loss in self._held_out),
                view_step=tuple(self._views),
            )
        return self._made
