"""What must hold at every moment of a simulated run, whatever fails."""

from collections.abc import Mapping

from p2p_dtfm.core.snapshot import ViewId
from p2p_dtfm.core.step import StepOutcome
from p2p_dtfm.core.view import View
from p2p_dtfm.sim.training import Gradient, State, loss_sum, true_state


class Violation(Exception):
    """An invariant is broken."""


class Invariants:
    """Told of everything that counts; raises `Violation`."""

    def __init__(self, microbatch_count: int) -> None:
        self.microbatch_count = microbatch_count
        self.commits: dict[int, tuple[ViewId, float | None]] = {}
        """By step, in the view where it was committed last."""
        self.furthest = 0
        self.commit_count = 0
        self._plans: dict[ViewId, str] = {}
        self._numbers: dict[tuple[int, str], ViewId] = {}
        self._outcomes: dict[tuple[ViewId, int], StepOutcome] = {}
        self._lineages: dict[tuple[ViewId, int], str] = {}

    def takes_over(self, name: str, life: int, view: View) -> None:
        """No two peers are in one view with different plans; none is in two views of a number."""
        plan = self._plans.setdefault(view.id, view.plan.digest())
        if plan != view.plan.digest():
            raise Violation(f"{name} takes over view {view.id} with another plan")
        held = self._numbers.setdefault((view.id.number, f"{name}/{life}"), view.id)
        if held != view.id:
            raise Violation(f"{name} takes over {view.id} after {held}")

    def commits_step(self, name: str, view: ViewId, outcome: StepOutcome, lineage: str) -> None:
        """A step of a view has one outcome and one lineage, and the loss of an undisturbed run."""
        step = outcome.step
        if self._outcomes.setdefault((view, step), outcome) != outcome:
            raise Violation(f"{name} commits step {step} of view {view} with another outcome")
        if self._lineages.setdefault((view, step), lineage) != lineage:
            raise Violation(f"{name} commits step {step} of view {view} on another lineage")
        if outcome.token_count != self.microbatch_count:
            raise Violation(
                f"{name} commits step {step} with {outcome.token_count} of "
                f"{self.microbatch_count} samples"
            )
        expected = loss_sum(step, self.microbatch_count) / self.microbatch_count
        if outcome.loss != expected:
            raise Violation(f"step {step} has loss {outcome.loss}, undisturbed {expected}")
        self.commits[step] = (view, outcome.loss)
        self.commit_count += 1
        self.furthest = max(self.furthest, step + 1)

    def applies(self, name: str, layer: int, state: State, gradient: Gradient | None) -> None:
        """Each sample counts once, and was computed on the very state that it changes."""
        where = f"{name} at layer {layer}, step {state.version}"
        if gradient is None:
            raise Violation(f"{where}: committed without a reduced gradient")
        if gradient.microbatches != tuple(range(self.microbatch_count)):
            raise Violation(f"{where}: samples {gradient.microbatches}")
        if gradient.base != state.value:
            raise Violation(f"{where}: gradient of another state")

    def holds(self, name: str, states: Mapping[int, State]) -> None:
        """Every state is that of an undisturbed run."""
        for layer, state in states.items():
            if state != true_state(state.version, self.microbatch_count):
                raise Violation(f"{name} has a wrong state of layer {layer} at {state.version}")
