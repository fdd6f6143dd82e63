"""What happened when, in virtual time: of each stage, and of the whole step."""

from dataclasses import dataclass, field

from p2p_dtfm.core.cost_model.pipeline_timing import StageAtWork
from p2p_dtfm.core.schedule.tasklets import FORWARD, WEIGHT, TaskletKind
from p2p_dtfm.sim.step_time.step_work import SimulatedStage

NEVER = 1 << 62


@dataclass(slots=True)
class StageTimeline:
    """Busy and idle time of one stage until its pipeline is done.

    Idle time counts as filling or draining at the ends of a phase: before the stage's first tasklet
    of a flush's forwards or backwards, and after its last. All other idle time is waiting for
    links.
    """

    work: SimulatedStage
    busy_ns: int = 0
    fill_and_drain_ns: int = 0
    waiting_ns: int = 0
    idle_since_ns: int = 0
    done_ns: int = 0
    peak_in_flight: int = 0
    tasklets: list[tuple[bool, int, int, int]] | None = None
    """(whether it is a backward, microbatch, start, end), if a trace is wanted."""
    flush: int = NEVER
    """Microbatches between one filling of the pipeline and the next."""
    begins: frozenset[int] = frozenset()
    """The first microbatch after each filling, where fillings are not equally far apart."""

    def ran(self, start_ns: int, end_ns: int, first_of_phase: bool) -> None:
        """Note that a tasklet ran. Tasklets come in order of time."""
        idle = start_ns - self.idle_since_ns
        if first_of_phase:
            self.fill_and_drain_ns += idle
        else:
            self.waiting_ns += idle
        self.busy_ns += end_ns - start_ns
        self.idle_since_ns = self.done_ns = end_ns

    def began(
        self, stage: StageAtWork, kind: TaskletKind, count: int, start_ns: int, end_ns: int
    ) -> None:
        """Note that the engine has begun a tasklet, or `count` weights at once."""
        if kind is FORWARD:
            number = stage.forwards_begun - 1
            self.peak_in_flight = max(self.peak_in_flight, stage.held)
        else:
            number = stage.microbatches - stage.left - (stage.owed + count if kind is WEIGHT else 0)
        first = number % self.flush == 0 or number in self.begins
        self.ran(start_ns, end_ns, kind is not WEIGHT and first)
        if self.tasklets is not None:
            self.tasklets.append((kind is not FORWARD, number, start_ns, end_ns))


@dataclass(frozen=True, slots=True)
class StepTime:
    """The simulated step. The parts add up to `total_ns`.

    The first parts are those of the stage that computes the longest: its computing, its waiting for
    activations and gradients, and the filling and draining around it. Then come the part of the
    reduction that no pipeline hides, the wait for guardians, and the commit round.
    """

    total_ns: int
    compute_ns: int
    waiting_ns: int
    fill_and_drain_ns: int
    reduction_ns: int
    guarding_ns: int
    commit_ns: int
    pipelines_done_ns: int
    microbatches: int
    """Fewer than the step's where an execution only does whole flushes."""
    stages: tuple[StageTimeline, ...] = ()
    reductions: tuple["ReductionSpan", ...] = ()
    links: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    event_count: int = 0


@dataclass(frozen=True, slots=True)
class ReductionSpan:
    """The reduction of a segment, from its first byte to the last holder that has the sum."""

    first_layer: int
    holders: tuple[int, ...]
    gradient_bytes: int
    start_ns: int
    end_ns: int
