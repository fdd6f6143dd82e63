"""Audits before a commit: `[audit]` of a run spec."""

from typing import Any, Literal

from pydantic import Field, model_validator

from p2p_dtfm.core.protocol.model_spec import Section

EDGE_BYTES = 140
"""Bytes that a middle stage claims for each microbatch: four digests, and what is around them."""
MICROBATCHES_LIMIT = 44 * 1024 // EDGE_BYTES
"""Microbatches in a step. Where all go through one stage, its Prepared states so many bytes of
edges. Others pass it on as a whole after a failure (`message_bounds.ACCOUNT_LIMIT_BYTES`)."""
UNDO_COPIES = 4
"""States that are kept to go back to. Three reach back over `undo_steps`, while the newest is still
being made whole."""


class AuditSpec(Section):
    """Whether stage-holders compute each other's work again. Experimental."""

    rate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="the part of all works in a step that are computed again, bit for bit, before "
        "it commits; 0: none",
    )
    arithmetic: Literal["most", "any"] = Field(
        default="most",
        description="most: where more than half of the stage-holders compute alike, bit for bit, "
        "who does not has no place, as nobody can compute its work again; any, and where no more "
        "than half do: it keeps its place, and is not audited",
    )

    follow_steps: int = Field(
        default=50,
        ge=0,
        le=1_000_000,
        description="for so many steps a peer that comes while the run is under way has no stage; "
        "then it gets one beside somebody else's, and a fifth of its works is audited for 300 "
        "steps; 0: newcomers are like all others",
    )

    undo_steps: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="when somebody is barred for false work, the run goes back to a state of at "
        "least so many steps before the proof, and does again what was done since; 0: what was "
        "committed stays",
    )

    @model_validator(mode="after")
    def _takes_back_what_is_proven(self) -> "AuditSpec":
        if self.undo_steps and not self.rate:
            raise ValueError("audit.undo_steps needs audit.rate: without audits nobody is barred")
        return self

    @property
    def undo_every(self) -> int:
        """Steps between the states that are kept for an undo; 0 where none are kept."""
        return -(-self.undo_steps // 2)

    def without_later_defaults(self, values: dict[str, Any]) -> None:
        """Takes out of the dumped `values` what a run without audits or undo does not use. So such
        a run keeps the name that it had before these choices came."""
        if not self.rate:
            del values["audit"]
        elif not self.undo_steps:
            del values["audit"]["undo_steps"]

    @property
    def rate_millionths(self) -> int:
        return round(self.rate * 1_000_000)
