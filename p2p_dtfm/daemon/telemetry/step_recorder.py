"""What this peer did in its last steps, and when: for the dashboard's bars and for traces."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from p2p_dtfm.ports import now
from p2p_dtfm.web.state import Span

STEPS_KEPT = 32
SPANS_LIMIT = 8192
"""Spans of one step; later ones are not recorded."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass
class RecordedStep:
    """Spans by this machine's monotonic clock, in the order of their ends."""

    step: int
    spans: list[Span] = field(default_factory=list)
    finished: bool = False


class StepRecorder:
    """The last `STEPS_KEPT` steps. One that is repeated after a failure replaces itself."""

    def __init__(self) -> None:
        self._steps: deque[RecordedStep] = deque(maxlen=STEPS_KEPT)

    def begin(self, step: int, *, goes_on: bool = False) -> None:
        """What follows belongs to this step; with `goes_on` so does what was recorded of it."""
        if goes_on and self._steps and self._steps[-1].step == step:
            return
        while self._steps and self._steps[-1].step >= step:
            self._steps.pop()
        self._steps.append(RecordedStep(step))

    def end(self) -> None:
        """The step is over here."""
        if self._steps:
            self._steps[-1].finished = True

    @contextlib.contextmanager
    def span(self, kind: str, number: int = 0) -> Iterator[None]:
        """Record how long the body takes, if it comes to its end."""
        start_ns = now.monotonic_ns()
        yield
        self._add(kind, number, start_ns)

    def timed(
        self, kind: str, number: int, function: Callable[Parameters, Result]
    ) -> Callable[Parameters, Result]:
        """`function`, recorded where it runs: without the time that it waits for its turn."""

        def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with self.span(kind, number):
                return function(*args, **kwargs)

        return run

    def _add(self, kind: str, number: int, start_ns: int) -> None:
        if self._steps and len(self._steps[-1].spans) < SPANS_LIMIT:
            self._steps[-1].spans.append(Span(kind, number, start_ns, now.monotonic_ns()))

    @property
    def newest(self) -> int | None:
        """The newest step that is over here."""
        return max((held.step for held in self._steps if held.finished), default=None)

    def steps(self, first: int, count: int) -> list[RecordedStep]:
        """Those of `first` to `first + count - 1` that are over and still held, in order."""
        wanted = range(first, first + count)
        return [held for held in self._steps if held.finished and held.step in wanted]
