"""A head that is the token embedding: one matrix, of which both layers keep a copy.

Its gradient is the sum of both layers' parts. Whoever has reduced both gives both copies that sum,
and since they start alike and are updated by equal arithmetic, they stay alike to the last bit. The
planner leaves both layers with the same peers, so no message is needed for it.
"""

from torch import Tensor

from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.stage.finite import NotFinite, is_finite


def tied_layers(spec: RunSpec) -> tuple[int, ...]:
    """The embedding and the head, if they share their matrix, and it is trained."""
    is_trained = spec.model.tied_head and not spec.trains_adapters
    return (0, layer_count(spec) - 1) if is_trained else ()


def tie(spec: RunSpec, reduced: dict[int, Tensor]) -> dict[int, Tensor]:
    """Reduced gradients of the two layers with the sum in both: flat fp32, in memory of their own,
    since a gradient buffer keeps this peer's part. Raises `NotFinite`."""
    first, last = tied_layers(spec)
    count = _matrix_elements(spec.model)
    embedding = reduced[first].clone()
    head = reduced[last].clone()
    matrix = embedding[:count]  # comes first in its layer, and last in the head's
    matrix += head[-count:].to(matrix.device)
    if not is_finite(matrix):
        raise NotFinite("the gradient of the tied matrix is not finite")
    head[-count:].copy_(matrix)
    return {first: embedding, last: head}


def counted_once(spec: RunSpec, layer: int, reduced: Tensor) -> Tensor:
    """What of a layer's reduced gradient enters the norm: the shared matrix does in the embedding
    alone."""
    if layer in tied_layers(spec)[1:]:
        return reduced[: -_matrix_elements(spec.model)]
    return reduced


def _matrix_elements(model: ModelSpec) -> int:
    return model.vocabulary * model.width
