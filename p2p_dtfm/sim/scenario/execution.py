"""How a plan is carried out: order of the tasklets, transport, reduction, codecs, recomputation."""

from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.workload import CODEC_BYTES_PER_KIBI, KIBI

Order = Literal["1f1b", "gpipe"]
Transport = Literal["streams", "communicator"]
ReductionKind = Literal["chain", "central", "flat", "weighted", "hierarchical"]
Overlap = Literal["none", "stage", "layer"]

CODEC_BITS_PER_VALUE = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 9}
"""int8 is blockwise: 8 bits a value, and a scale for each 32 values."""
OF_REDUCTIONS = ("sparse", "sign")
"""Codecs that only reductions have."""
OF_BOUNDARIES = ("rotated4", "rotated6", "subspace")
"""Codecs that are only for what travels between stages."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """DT-FM's transport: blocking sends and receives of a peer, one at a time, in program order.

    Before a receive is posted, a sender gets rid of at most `receive_buffer_bytes` and a round
    trip's worth of bytes, to which TCP tunes its buffers. The rest waits. A send returns when no
    more of it is left than TCP holds until it is acknowledged: a round trip's worth, at most
    `window_bytes`. `efficiency` is the fraction of a link's rate that such messages reach.
    """

    efficiency: float
    receive_buffer_bytes: int
    window_bytes: int


@dataclass(frozen=True, slots=True)
class Execution:
    """Everything besides the plan that decides how long a step takes."""

    name: str
    order: Order
    reduction: ReductionKind
    overlap: Overlap
    """When a gradient sets out: after all pipelines are done, after its own stage is, or after the
    last backward is through its layer."""
    commit: bool
    """Whether the step ends with a Prepared from every stage-holder to every other. It waits for
    the guardian of layers that the peer holds alone."""
    activation_codec: str | None = "fp16"
    """None stands for what the run allows, as a daemon's planner counts it."""
    gradient_codec: str | None = "fp16"
    """`sparse` is as the run defines it, `sign` is a bit for each value, and None is the run's
    own."""
    recompute: bool | None = True
    """None stands for what the run says, by the plan and each peer's memory."""
    split_backward: bool = False
    """Whether a stage leaves the gradients of matrices for when it would wait (zero-bubble). Not
    with recomputation: what that saves would be held again."""
    communicator: Communicator | None = None
    """None stands for persistent streams, full duplex, which send beside computing."""
    language_model_head: bool = True
    """Whether the last layer works out a vocabulary. DT-FM's runs ended in a small classifier."""
    flush_microbatches: int = 0
    """GPipe's forwards before the first backward; 0 for all of the step's."""

    def __post_init__(self) -> None:
        between = None if self.activation_codec in OF_BOUNDARIES else self.activation_codec
        for codec in (between, None if self.is_of_reductions else self.gradient_codec):
            if codec is not None and codec not in CODEC_BITS_PER_VALUE:
                known = ", ".join((*CODEC_BITS_PER_VALUE, *OF_BOUNDARIES, *OF_REDUCTIONS))
                raise UserError(f"unknown codec {codec!r}", f"one of: {known}")

    def with_reduction(self, kind: str) -> "Execution":
        """The same with another reduction. Raises `UserError`."""
        if kind not in get_args(ReductionKind):
            known = ", ".join(get_args(ReductionKind))
            raise UserError(f"unknown reduction {kind!r}", f"one of: {known}")
        return replace(self, reduction=cast(ReductionKind, kind))

    def with_codec(self, codec: str) -> "Execution":
        """The same with that codec for all tensors. `sparse` and `sign` are only for the reduction,
        which alone has them; rotations and `subspace` only for what travels between stages. Raises
        `UserError`."""
        if codec in OF_REDUCTIONS:
            return replace(self, gradient_codec=codec)
        if codec in OF_BOUNDARIES:
            return replace(self, activation_codec=codec)
        return replace(self, activation_codec=codec, gradient_codec=codec)

    @property
    def is_of_reductions(self) -> bool:
        return self.gradient_codec in OF_REDUCTIONS

    @property
    def splits(self) -> bool:
        return self.split_backward and self.order == "1f1b" and not self.recompute

    @property
    def backward_forwards(self) -> int:
        """How many times longer a backward takes than a forward (Kaplan et al. 2020: twice)."""
        return 3 if self.recompute else 2


OURS = Execution(
    "ours",
    order="1f1b",
    reduction="weighted",
    overlap="layer",
    commit=True,
    split_backward=True,
)

AS_RUN = replace(OURS, activation_codec=None, gradient_codec=None, recompute=None)
"""What daemons do with a run: its codecs, its inner steps, its recomputation."""

DTFM_COMMUNICATOR = Communicator(
    efficiency=0.8173,
    receive_buffer_bytes=7_386_000,
    window_bytes=2_510_000,
)
"""Fitted to the paper's measurements (docs/simulator.md)."""

DTFM = Execution(
    "dtfm",
    order="gpipe",
    reduction="chain",
    overlap="stage",
    commit=False,
    communicator=DTFM_COMMUNICATOR,
    language_model_head=False,
    flush_microbatches=64,
)


def execution_named(name: str, block_count: int) -> Execution:
    """`ours`, as the run says, or `dtfm`. DT-FM flushed every 64 microbatches, but every 62 at 40
    layers for want of memory. Raises `UserError`."""
    if name == "ours":
        return AS_RUN
    if name == "dtfm":
        return DTFM if block_count < 40 else replace(DTFM, flush_microbatches=62)
    raise UserError(f"unknown execution {name!r}", "one of: ours, dtfm")


def wire_bytes(values: int, codec: str) -> int:
    """Bytes of a tensor of `values` numbers on the wire."""
    if codec in OF_BOUNDARIES:
        return -(-values * CODEC_BYTES_PER_KIBI[codec] // KIBI)
    return -(-values * CODEC_BITS_PER_VALUE[codec] // 8)
