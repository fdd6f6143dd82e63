"""`[optimizer]` of a run spec: what updates the parameters, and at which rate."""

from typing import Any, Literal

from pydantic import Field, model_validator

from p2p_dtfm.core.protocol.model_spec import STEPS_LIMIT, Section


class MuonSpec(Section):
    """Muon's options for the matrices of blocks. Its rate follows the same schedule as AdamW's."""

    peak_learning_rate: float = Field(default=0.02, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0)


class OptimizerSpec(Section):
    """Linear warm-up, a decay by `schedule`, and clipping of the global norm.

    `muon` (Jordan et al. 2024) updates the matrices of blocks alone. AdamW, with the options here,
    updates the rest.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    muon: MuonSpec = MuonSpec()
    peak_learning_rate: float = Field(gt=0)
    final_learning_rate: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0, le=STEPS_LIMIT)
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    clip_norm: float = Field(default=1.0, gt=0)
    schedule: Literal["cosine", "wsd"] = Field(
        default="cosine",
        description="cosine: falls from the warm-up on; wsd (warm-up, stable, decay; Hu et al. "
        "2024): stays at the peak, and falls in a straight line at the end",
    )
    decay_steps: int = Field(
        default=0,
        ge=0,
        le=STEPS_LIMIT,
        description="wsd: how long it falls; 0: a fifth of the run",
    )
    decay_embeddings: bool = Field(
        default=True, description="whether weight decay is of embeddings too, as of all matrices"
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="so many times the squared logarithm of the softmax's denominator is added to "
        "what is minimised (PaLM: 1e-4), not to the loss that is told",
    )

    @model_validator(mode="after")
    def _decays_when_it_says(self) -> "OptimizerSpec":
        if self.schedule != "wsd" and self.decay_steps:
            raise ValueError('optimizer.decay_steps counts only with optimizer.schedule = "wsd"')
        return self

    def without_later_defaults(self, values: dict[str, Any]) -> None:
        """Takes out of the dumped `values` the later choices that are at their defaults."""
        if self.kind == "adamw":
            del values["kind"], values["muon"]
        for name in ("schedule", "decay_steps", "decay_embeddings", "z_loss"):
            if getattr(self, name) == type(self).model_fields[name].default:
                del values[name]

    @model_validator(mode="after")
    def _muon_counts(self) -> "OptimizerSpec":
        if self.kind != "muon" and self.muon != MuonSpec():
            raise ValueError('optimizer.muon counts only with optimizer.kind = "muon"')
        return self
