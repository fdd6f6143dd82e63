"""A GPT's layers as kinds, so that its blocks need not all be of one width.

embedding   token numbers to [tokens, width]; its width is [model]'s unless it says another
block       a transformer block as wide as what comes in; `heads`, `feed_forward_width`
projection  [tokens, width] to another `width`
head        logits of the vocabulary, for each token
"""

from torch import Tensor, nn

from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.layers.gpt_sizes import block_flops, saved_values
from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.train.model.block import Block, norm_over
from p2p_dtfm.train.model.deferred_gradients import Linear
from p2p_dtfm.train.model.kinds.ends import Embedding, Head
from p2p_dtfm.train.model.kinds.kind import STANDARD_DEVIATION, Costs, LayerKind, Place, Shape


class EmbeddingKind(LayerKind):
    options = frozenset({"width"})

    def boundary(self, place: Place) -> Shape:
        if not place.is_first:
            raise ValueError("reads token numbers, so it comes first")
        return place.model.context, place.number("width", place.model.width)

    def build(self, place: Place) -> nn.Module:
        return Embedding(_as_wide_as(place.model, self.boundary(place)[1]))

    def costs(self, place: Place) -> Costs:
        tokens, width = self.boundary(place)
        return Costs(tokens * width, tokens * width)

    def deviation(self, name: str, shape: Shape) -> float:
        return STANDARD_DEVIATION


class BlockKind(LayerKind):
    options = frozenset({"heads", "feed_forward_width"})

    def boundary(self, place: Place) -> Shape:
        self._model(place)
        return place.entry

    def build(self, place: Place) -> nn.Module:
        return Block(self._model(place))

    def costs(self, place: Place) -> Costs:
        model = self._model(place)
        tokens = model.context
        return Costs(tokens * saved_values(model), block_flops(model, tokens, tokens))

    def deviation(self, name: str, shape: Shape) -> float:
        return STANDARD_DEVIATION

    def _model(self, place: Place) -> ModelSpec:
        """`[model]` of a GPT whose blocks are all like this one."""
        _, width = _stream(place)
        heads = place.number("heads", place.model.heads, most=512)
        hidden = place.number("feed_forward_width", 0, 0, 1 << 20)
        if place.model.kv_heads or place.model.head_width:
            raise ValueError("has as many keys as queries: leave model.kv_heads and head_width out")
        if width % heads:
            raise ValueError(f"heads ({heads}) must divide the width of what comes in ({width})")
        model = _as_wide_as(place.model, width)
        return model.model_copy(update={"heads": heads, "feed_forward_width": hidden})


class ProjectionKind(LayerKind):
    options = frozenset({"width"})

    def boundary(self, place: Place) -> Shape:
        tokens, _ = _stream(place)
        if "width" not in place.options:
            raise ValueError("needs the width that it leads to")
        return tokens, place.number("width", 0)

    def build(self, place: Place) -> nn.Module:
        return Projection(place.model, place.entry[1], self.boundary(place)[1])

    def costs(self, place: Place) -> Costs:
        (tokens, entry), (_, width) = place.entry, self.boundary(place)
        return Costs(tokens * (3 * entry + width), 2 * tokens * entry * width)


class HeadKind(LayerKind):
    def boundary(self, place: Place) -> Shape:
        tokens, _ = _stream(place)
        return tokens, place.model.vocabulary

    def build(self, place: Place) -> nn.Module:
        return Head(_as_wide_as(place.model, _stream(place)[1]))

    def costs(self, place: Place) -> Costs:
        tokens, width = _stream(place)
        vocabulary = place.model.vocabulary
        saved = tokens * (2 * width + 3 * vocabulary)
        return Costs(saved, 2 * tokens * width * vocabulary)

    def deviation(self, name: str, shape: Shape) -> float:
        return STANDARD_DEVIATION


class Projection(nn.Module):
    """Has a norm before it, so that a step to another width does not change how large values
    are."""

    def __init__(self, model: ModelSpec, entry: int, width: int) -> None:
        super().__init__()
        self.norm = norm_over(model, entry)
        self.matrix = Linear(entry, width, bias=True)

    def forward(self, stream: Tensor) -> Tensor:
        """[sequences, tokens, entry] to [sequences, tokens, width]."""
        result: Tensor = self.matrix(self.norm(stream))
        return result


def _stream(place: Place) -> tuple[int, int]:
    """(tokens, width) of the layer's input. Raises ValueError."""
    if place.is_first:
        raise ValueError("reads no token numbers, so it cannot come first")
    tokens, width = place.require_entry("tokens", "width")
    if tokens != place.model.context:
        raise ValueError(f"reads {counted(place.model.context, 'token')}, and {tokens} come in")
    return tokens, width


def _as_wide_as(model: ModelSpec, width: int) -> ModelSpec:
    return model.model_copy(update={"width": width, "feed_forward_width": 0})
