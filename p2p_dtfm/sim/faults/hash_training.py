"""Training without numbers: states and gradients that tell what they were made of.

A layer's value is a chain of hashes over the steps. So a state that any other batch, order or
version went into shows at once.
"""

from dataclasses import dataclass
from functools import lru_cache

from p2p_dtfm.core.protocol.snapshot import Member, ViewId

GENESIS_VALUE = 1


@dataclass(frozen=True)
class HashState:
    version: int
    value: int


@dataclass(frozen=True)
class Gradient:
    """The gradient of these microbatches, computed on this state."""

    microbatches: tuple[int, ...]
    base: int


@dataclass(frozen=True)
class BoundaryTensors:
    """Activations of microbatches for the next stage, or their gradients for the stage before."""

    sender: Member
    view: ViewId
    step: int
    is_activation: bool
    microbatches: tuple[int, ...]
    base: int
    """The value of the state that they were computed on."""


@dataclass(frozen=True)
class Partial:
    """One replica's gradients of its layers, sent to the other replicas."""

    sender: Member
    view: ViewId
    step: int
    layers: dict[int, Gradient]


@dataclass(frozen=True)
class Reduced:
    """Reduced gradients, sent by a holder to the guardian of its layers."""

    sender: Member
    view: ViewId
    step: int
    layers: dict[int, Gradient]


@dataclass(frozen=True)
class Receipt:
    """The guardian has the states at `step` and the reduced gradients of it."""

    sender: Member
    view: ViewId
    step: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class CutCopy:
    """States as of a cut's step, for a guardian that lags."""

    sender: Member
    view: ViewId
    step: int
    lineage: str
    states: dict[int, HashState]


@dataclass(frozen=True)
class LayersReceipt:
    """The guardian has a copy of these layers as of `step`."""

    sender: Member
    view: ViewId
    step: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class StateRequest:
    """A request for the states that the sender's place in `view` needs."""

    sender: Member
    view: ViewId
    layers: tuple[int, ...]


@dataclass(frozen=True)
class StateReply:
    sender: Member
    view: ViewId
    states: dict[int, HashState]
    lineages: dict[int, str]


Tensor = (
    BoundaryTensors
    | Partial
    | Reduced
    | Receipt
    | CutCopy
    | LayersReceipt
    | StateRequest
    | StateReply
)


def applied(state: HashState, gradient: Gradient) -> HashState:
    """The state after the optimizer's step."""
    value = hash((state.value, state.version, gradient.microbatches, gradient.base))
    return HashState(state.version + 1, value)


def reduce(parts: list[Gradient]) -> Gradient | None:
    """The sum of the parts; None where they were computed on different states."""
    if len({part.base for part in parts}) != 1:
        return None
    return Gradient(tuple(sorted(n for part in parts for n in part.microbatches)), parts[0].base)


@lru_cache(maxsize=65536)
def true_state(version: int, microbatch_count: int) -> HashState:
    """The state that a single, never disturbed process has."""
    if version == 0:
        return HashState(0, GENESIS_VALUE)
    before = true_state(version - 1, microbatch_count)
    return applied(before, Gradient(tuple(range(microbatch_count)), before.value))


def loss_sum(step: int, count: int) -> float:
    """The loss of `count` microbatches of one token each. It is a multiple of 2^-10, so that sums
    are exact."""
    return count * (1.0 + (step * 37 % 1024) / 1024)
