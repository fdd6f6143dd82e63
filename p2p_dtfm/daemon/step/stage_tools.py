"""What a stage-holder's engine is made of: where it stands, its tools, whom it tells."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.mailbox import Mailbox
from p2p_dtfm.daemon.step.step_frames import StepFrames
from p2p_dtfm.daemon.telemetry.step_recorder import StepRecorder
from p2p_dtfm.train.stage.replica_memory import ReplicaMemory

Tensor = Any
Batch = tuple[Tensor, Tensor]
"""int64 inputs and targets, each [sequences, tokens]."""
BatchOf = Callable[[int, int], Batch]
"""`batch(step, index)`: the tokens of a microbatch; called in the compute thread. Indices from
`microbatches_per_step` on are held-out ones."""
WeightOf = Callable[[int, int], float]
"""`weight(step, index)`: the factor by which a microbatch's loss is multiplied; called where
`batch` is."""


class WeighedBatches(Protocol):
    """The data of steps: `BatchOf`, and `WeightOf` by name."""

    def __call__(self, step: int, index: int, /) -> Batch: ...

    def weight(self, step: int, index: int, /) -> float: ...


OnProgress = Callable[[int, StageProgress | None], None]
OnAlone = Callable[[int, int, Tensor], None]
"""Called with a step, a layer and the layer's reduced gradient, which stays as it is."""


@dataclass(frozen=True)
class StagePlace:
    """Where a stage-holder stands: who it is in which plan of which run."""

    plan: Plan
    me: str
    spec: RunSpec
    recompute: bool = False
    """Whether its memory is too small for the activations of all microbatches under way."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline in which it has a place of its own."""
        number, _ = self.plan.places_of(self.me)[0]
        return self.plan.pipelines[number]

    @property
    def stage(self) -> Stage:
        """The stage that it computes there."""
        _, position = self.plan.places_of(self.me)[0]
        return self.pipeline.stages[position]


def always_one(step: int, index: int) -> float:
    """The weight where every token counts."""
    return 1.0


@dataclass(frozen=True)
class StageTools:
    """What a stage-holder computes with. What the replica remembers for itself is proposed to
    `memory`; the caller commits it."""

    compute: Compute
    memory: ReplicaMemory
    batch: BatchOf
    recorder: StepRecorder = field(default_factory=StepRecorder)
    weight: WeightOf = always_one


@dataclass(frozen=True)
class StageLinks:
    """What reaches a stage-holder from others, and what it sends them."""

    mailbox: Mailbox
    frames: StepFrames


def tell_nobody(step: int, progress: StageProgress | None) -> None:
    """For progress of which nobody needs to know."""


@dataclass(frozen=True)
class StageListeners:
    """Whom a stage-holder tells while a step is under way.

    `progress(step, progress)` is told of all that is kept of the step, before another forward or
    backward is begun. `alone` is told of the reduced gradient of each layer that nobody else holds,
    as soon as it is there.
    """

    progress: OnProgress = tell_nobody
    alone: OnAlone | None = None
