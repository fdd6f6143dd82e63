"""A head that is the token embedding: one matrix, of which both layers keep a copy.

Its gradient is the sum of both layers' parts. Both copies get that sum, wherever they lie
(`core.schedule.tied_ends`). They start alike and are updated by equal arithmetic, so they stay
alike to the last bit.
"""

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.schedule.tied_ends import tied_ends
from p2p_dtfm.train.stage.finite import NotFinite, is_finite


def shared_part(spec: RunSpec, layer: int, flat: Tensor) -> Tensor:
    """The matrix in an end's flat parameters or gradient: a view. It comes first in the embedding,
    and last in the head."""
    count = _matrix_elements(spec.model)
    return flat[:count] if layer == 0 else flat[-count:]


def joined(parts: list[Tensor]) -> Tensor:
    """The matrix from its parts, which are in order: flat."""
    return torch.cat(parts)


def tie(
    spec: RunSpec, reduced: dict[int, Tensor], elsewhere: Tensor | None = None
) -> dict[int, Tensor]:
    """The reduced gradients of the ends that are held here, each with the sum of both ends. They
    are flat fp32 in memory of their own, since a gradient buffer keeps this peer's part.
    `elsewhere`: the other end's sum of the matrix, if only one end is held. Raises `NotFinite`."""
    held = [layer for layer in tied_ends(spec) if layer in reduced]
    assert len(held) == (2 if elsewhere is None else 1), "each end's sum is here or has come"
    tied = {layer: reduced[layer].clone() for layer in held}
    matrices = [shared_part(spec, layer, tied[layer]) for layer in held]
    other = matrices[-1] if elsewhere is None else elsewhere
    matrices[0] += other.to(matrices[0].device)
    if not is_finite(matrices[0]):
        raise NotFinite("the gradient of the tied matrix is not finite")
    for copy in matrices[1:]:
        copy.copy_(matrices[0])
    return tied


def counted_once(spec: RunSpec, layer: int, reduced: Tensor) -> Tensor:
    """The part of a layer's reduced gradient that enters the norm. The shared matrix enters it only
    with the embedding."""
    if layer in tied_ends(spec)[1:]:
        return reduced[: -_matrix_elements(spec.model)]
    return reduced


def _matrix_elements(model: ModelSpec) -> int:
    return model.vocabulary * model.width
