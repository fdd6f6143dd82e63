"""Adapters over a frozen model (LoRA: Hu et al. 2021): `[lora]` of a run spec.

Beside a frozen matrix W [outputs, inputs] lie two narrow ones, A [rank, inputs] and B [outputs,
rank]; the layer computes (W + alpha / rank * B A) x. Only A and B are trained, so only they have
gradients, moments, reductions, guardians and checkpoints. B starts as zeros: the run begins with
the model that was given.
"""

from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from p2p_dtfm.core.protocol.model_spec import ModelSpec, Section

Target = Literal["query", "key", "value", "output", "gate", "up", "down"]


_UNSTATED: tuple[float, tuple[Target, ...]] = (16.0, ("query", "value"))
"""Alpha and targets where a run spec does not say them."""


class LoraSpec(Section):
    """Which matrices of blocks get adapters, and how wide these are."""

    rank: int = Field(default=0, ge=0, le=1024, description="0: all parameters are trained")
    alpha: float = Field(default=_UNSTATED[0], gt=0, le=1e6, description="they count alpha / rank")
    targets: tuple[Target, ...] = Field(default=_UNSTATED[1], min_length=1)
    dropout: float = Field(default=0.0, ge=0, description="none but 0")

    @model_validator(mode="after")
    def _steps_can_be_repeated(self) -> "LoraSpec":
        if self.dropout:
            raise ValueError(
                "dropout must be 0: after a failure a step is computed again, by other peers, and "
                "has to come out alike"
            )
        if len(set(self.targets)) < len(self.targets):
            raise ValueError("targets names a matrix twice")
        if not self.rank and (self.alpha, self.targets) != _UNSTATED:
            raise ValueError("rank must be at least 1")
        return self

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / self.rank


class AdaptedMatrix(NamedTuple):
    """Rows of one of our linear layers that have an adapter."""

    part: str
    """The linear layer: `attention_input` holds queries, keys and values."""
    target: str
    first_row: int
    outputs: int
    inputs: int

    def parameter_count(self, rank: int) -> int:
        return rank * (self.inputs + self.outputs)


def adapted_matrices(model: ModelSpec, lora: LoraSpec) -> list[AdaptedMatrix]:
    """A block's adapted matrices, in canonical order; none where all parameters are trained."""
    queries, keys, hidden = model.query_width, model.key_width, model.hidden_width
    is_gated = model.feed_forward == "swiglu"
    entries: list[tuple[str, int, list[tuple[str, int]]]] = [
        ("attention_input", model.width, [("query", queries), ("key", keys), ("value", keys)]),
        ("attention_output", queries, [("output", model.width)]),
        (
            "feed_forward_input",
            model.width,
            [("gate", hidden), ("up", hidden)] if is_gated else [("up", hidden)],
        ),
        ("feed_forward_output", hidden, [("down", model.width)]),
    ]
    found = []
    for part, inputs, matrices in entries:
        row = 0
        for target, outputs in matrices:
            if lora.rank and target in lora.targets:
                found.append(AdaptedMatrix(part, target, row, outputs, inputs))
            row += outputs
    return found


def reason_against(model: ModelSpec, lora: LoraSpec, is_muon: bool) -> str | None:
    """Why a run cannot train such adapters; None if it can."""
    if not lora.rank:
        return None
    if not model.initial:
        return (
            "lora: adapters lie over weights that are given, and model.initial names none "
            "(p2p-dtfm import MODEL --lora-rank writes such a run spec)"
        )
    if "gate" in lora.targets and model.feed_forward != "swiglu":
        return 'lora.targets names "gate", and only model.feed_forward = "swiglu" has one'
    if is_muon:
        return 'lora and optimizer.kind = "muon": an adapter is two narrow matrices of little rank'
    return None
