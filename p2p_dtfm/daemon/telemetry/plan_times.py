"""How long steps take under this plan and those before, and whether that asks for another one."""

from collections import deque
from collections.abc import Callable
from statistics import median

from p2p_dtfm.core.protocol.measured_plans import (
    PLANS_LIMIT,
    STEPS_ENOUGH,
    MeasuredPlan,
    PlanShape,
    is_told_of,
    names_in,
    shape_of,
)
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.ports import now

FORGOTTEN_S = 600.0
"""A machine is not busy for ever: what was tried so long ago may be tried again."""
KEPT_STEPS = 40
"""What was tried is kept for so many steps, if these take longer: a new plan shows its time after
some eleven."""
SETTLED_S = 15.0
"""A view's first steps are not like those after: layers are made ready, others connect."""
OTHERS_S = 3.0
"""How long a reason must last: others see it as well, and then say in their records how they
work."""
FIRST_PAUSE_S = 60.0
"""The first pause between two reasons; the next is twice as long, up to `FORGOTTEN_S`."""
SLOW_PERCENT = 150
"""In percent of the plan's step: steps that take more make a new plan from what was measured."""
WORSE_PERCENT = 110
"""In percent of what steps took before the change: steps that take more take it back."""


class PlanTimes:
    """How long steps took in this process. Call `took_over` with each view, `committed` with each
    step."""

    def __init__(self, clock_s: Callable[[], float] = now.monotonic_s) -> None:
        self._clock_s = clock_s
        self._known: dict[PlanShape, tuple[int, float]] = {}
        """By shape: the step's time, and when it was last measured."""
        self._steps_ns: deque[int] = deque(maxlen=STEPS_ENOUGH)
        self._view: View | None = None
        self._shape: PlanShape = ()
        self._dealt: tuple[int, ...] = ()
        self._untold = False
        """Whether the plan in force was made for another speed of somebody in it."""
        self._began_s = self._last_s = 0.0
        self._asked: dict[PlanShape, float] = {}
        self._since_s: float | None = None
        self._pause_s, self._quiet_until_s = FIRST_PAUSE_S, -FORGOTTEN_S

    def took_over(self, view: View) -> None:
        shape = shape_of(view.plan) if isinstance(view.plan, Plan) else ()
        dealt = _dealt(view.plan) if isinstance(view.plan, Plan) else ()
        is_same = shape == self._shape and not self._is_mended(view)
        is_untold, self._untold = self._untold, False
        if is_same and is_untold and dealt != self._dealt:
            is_same = False  # its work is dealt by another speed of somebody in it
            self._known.pop(shape, None)
        self._dealt = dealt
        if not is_same:
            self._steps_ns.clear()
            self._began_s = self._clock_s()
        elif view.snapshot.planned and self._since_s is not None:
            # another member saw it, too, and asked: all planned from what is told, and stay
            self._asked.setdefault(shape, self._clock_s())
        self._view, self._shape, self._last_s = view, shape, 0.0

    def committed(self) -> None:
        now_s = self._clock_s()
        before_s, self._last_s = self._last_s, now_s
        if before_s and now_s - self._began_s >= SETTLED_S and self._shape:
            self._steps_ns.append(int((now_s - before_s) * 1e9))
            if self.step_ns is not None and is_told_of(self._shape):
                self._known[self._shape] = self.step_ns, now_s
                self._forget(now_s)

    @property
    def step_ns(self) -> int | None:
        """What a step takes under the plan in force; None before enough were seen."""
        if len(self._steps_ns) < STEPS_ENOUGH:
            return None
        return max(1, int(median(self._steps_ns)))

    def told(self) -> tuple[MeasuredPlan, ...]:
        """The newest measured plans for this peer's record, in an order that is always the same."""
        self._forget(self._clock_s())
        return tuple(
            MeasuredPlan(shape, ns)
            for shape, (ns, _) in sorted(self._known.items())
            if not (self._untold and shape == self._shape)
        )

    def forget(self, peer_id: str) -> None:
        """A peer is notably slower or faster than it was: what steps took with it says nothing
        now."""
        self._untold = self._untold or peer_id in names_in(self._shape)
        others = (it for it in self._known if it != self._shape and peer_id in names_in(it))
        for shape in list(others):
            del self._known[shape]

    def why_anew(self) -> str | None:
        """Why the members should plan anew, if they should. It is said once for each plan in a
        while, and ever less often, since on a machine whose load comes and goes no plan stays the
        best."""
        found, now_s = self.reason, self._clock_s()
        if found is None or self._since_s is None:
            self._since_s = None if found is None else now_s
        kept_s = self._kept_s()
        self._asked = {k: at_s for k, at_s in self._asked.items() if now_s - at_s < kept_s}
        if found is None or self._shape in self._asked or now_s < self._quiet_until_s:
            return None
        if self._since_s is None or now_s - self._since_s < OTHERS_S:
            return None
        self._asked[self._shape] = now_s
        self._quiet_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, FORGOTTEN_S)
        return found

    @property
    def reason(self) -> str | None:
        """Why the plan in force is not as good as was thought; None if it is."""
        step_ns, view = self.step_ns, self._view
        if step_ns is None or view is None or self._is_mended(view):
            return None
        plan, members = view.plan, set(view.member_ids)
        if not isinstance(plan, Plan):
            return None
        others = [(ns, shape) for shape, (ns, _) in self._known.items() if shape != self._shape]
        best_ns = min((ns for ns, shape in others if names_in(shape) <= members), default=0)
        if best_ns and step_ns * 100 > WORSE_PERCENT * best_ns:
            return (
                f"a step takes {_ms(step_ns)}, and took {_ms(best_ns)} under an earlier plan: "
                "the change is taken back"
            )
        if plan.predicted_step_ns and step_ns * 100 > SLOW_PERCENT * plan.predicted_step_ns:
            planned = _ms(plan.predicted_step_ns)
            return (
                f"a step takes {_ms(step_ns)}, planned were {planned}: plans from what is measured"
            )
        return None

    @staticmethod
    def _is_mended(view: View | None) -> bool:
        """Whether the plan is only for the time until a better one is made."""
        plan = view.plan if view is not None else None
        return isinstance(plan, Plan) and bool(plan.stand_ins or plan.provisional)

    def _forget(self, now_s: float) -> None:
        newest = sorted(self._known.items(), key=lambda item: -item[1][1])[:PLANS_LIMIT]
        self._known = {k: v for k, v in newest if now_s - v[1] < self._kept_s(v[0])}

    def _kept_s(self, step_ns: int = 0) -> float:
        """How long a plan is remembered whose steps took so long; steps as they are now count as
        well."""
        longest_ns = max([step_ns, *self._steps_ns])
        return max(FORGOTTEN_S, KEPT_STEPS * longest_ns / 1e9)


def _dealt(plan: Plan) -> tuple[int, ...]:
    """How many microbatches each pipeline has."""
    return tuple(pipeline.microbatch_count for pipeline in plan.pipelines)


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.0f} ms" if duration_ns < 10**10 else f"{duration_ns / 1e9:.0f} s"
