"""`[[layers]]` of a run spec: a table for each layer, its kind, the kind's options, its sizes.

What a kind computes is known where torch is (`train.model.kinds`). Here a layer is its sizes alone.
The founder's kind states them, and they are part of the run's bytes. A peer that joins compares
them with those of its own kind of that name before it allocates anything.
"""

import math
from typing import Annotated, Any

from pydantic import Field, model_validator

from p2p_dtfm.core.protocol.model_spec import ModelSpec, Section

Dimension = Annotated[int, Field(ge=1, le=1 << 24)]
Word = Annotated[str, Field(max_length=64)]
Option = bool | Annotated[int, Field(ge=-(1 << 40), le=1 << 40)] | Word
"""No fractions: a run's bytes hold integers and words."""
MOST_LAYERS = 256
"""Layers that can be listed: a run spec has at most 64 KiB."""
_MOST_OPTIONS = 16
_MOST_BOUNDARY_VALUES = 1 << 26
"""Values at a boundary for one sequence."""
_OWN_KEYS = ("kind", "options", "sizes")


class LayerSizes(Section):
    """The sizes of a layer; all but the parameters are for one sequence."""

    boundary: tuple[Dimension, ...] = Field(
        min_length=1, max_length=4, description="shape of what it gives on; of the last, its answer"
    )
    parameters: int = Field(ge=1, le=1 << 40)
    saved_values: int = Field(ge=0, le=1 << 40, description="kept for its backward")
    forward_flops: int = Field(ge=0, le=1 << 60)

    @model_validator(mode="after")
    def _boundary_is_bounded(self) -> "LayerSizes":
        if self.boundary_values > _MOST_BOUNDARY_VALUES:
            raise ValueError(f"a boundary of more than {_MOST_BOUNDARY_VALUES} values")
        return self

    @property
    def boundary_values(self) -> int:
        """Values that the layer gives on for one sequence."""
        return math.prod(self.boundary)


class ListedLayer(Section):
    """One table of `[[layers]]`. Keys that are not its own are options of its kind."""

    kind: str = Field(pattern="^[a-z][a-z0-9-]{0,62}$")
    options: dict[Word, Option] = Field(default_factory=dict, max_length=_MOST_OPTIONS)
    sizes: LayerSizes | None = Field(default=None, description="filled in by founding")

    @model_validator(mode="before")
    @classmethod
    def _options_are_the_rest(cls, told: Any) -> Any:
        if not isinstance(told, dict) or "options" in told:
            return told
        own = {key: value for key, value in told.items() if key in _OWN_KEYS}
        return own | {"options": {k: v for k, v in told.items() if k not in _OWN_KEYS}}

    def __hash__(self) -> int:
        """Equal layers have equal hashes, so that results for a layer can be cached."""
        return hash((self.kind, tuple(sorted(self.options.items())), self.sizes))


def reason_against(layers: tuple[ListedLayer, ...], model: ModelSpec) -> str | None:
    """Why these cannot be the layers of this model; None if nothing is wrong."""
    if len(layers) != model.layer_count:
        return (
            f"[[layers]] lists {len(layers)}, and model.layers ({model.layers}) counts those "
            f"between the first and the last: set it to {len(layers) - 2}"
        )
    if model.tied_head:
        return "model.tied_head: the head of listed layers has a matrix of its own"
    if model.initial:
        return "model.initial: weights are given to GPTs of one width alone"
    stated = [layer.sizes is not None for layer in layers]
    if any(stated) and not all(stated):
        return "[[layers]]: either all of them state their sizes, or none does"
    return None
