"""How often states are written to the disk: `[checkpoint]` of a run spec."""

from pydantic import Field

from p2p_dtfm.core.protocol.model_spec import STEPS_LIMIT, Section


class CheckpointSpec(Section):
    """How often the state is written to disk, and how many states are kept."""

    every_steps: int = Field(default=100, ge=1, le=STEPS_LIMIT)
    keep: int = Field(
        default=2,
        ge=2,
        le=STEPS_LIMIT,
        description="two, so that a torn one never is the last",
    )

    def saves_at(self, step: int, undo_every: int) -> bool:
        """Whether the state at `step` is written to disk. In a run that takes back what a liar did,
        states for that are written, too."""
        return step % self.every_steps == 0 or (undo_every > 0 and step % undo_every == 0)
