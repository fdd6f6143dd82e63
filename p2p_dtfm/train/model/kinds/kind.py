"""What a kind of layer is: what whoever adds one has to say of it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.layers.listed import Option
from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.train.model.kinds.ends import token_loss_sum

Shape = tuple[int, ...]
"""Of one sequence's tensor: what comes for a microbatch has the number of sequences before it."""
STANDARD_DEVIATION = 0.02
"""GPT-2's."""


class Costs(NamedTuple):
    """Of one sequence, by which layers are weighed before any device has been measured."""

    saved_values: int
    """What autograd keeps between a forward and its backward."""
    forward_flops: int


class Place(NamedTuple):
    """Where a layer stands in a run."""

    model: ModelSpec
    """`[model]` of the run: what a kind's options do not say."""
    options: Mapping[str, Option]
    """Of this layer's table; whole numbers, words, yes or no."""
    entry: Shape
    """Of what comes in for one sequence."""
    is_first: bool
    """What comes in are token numbers, int64, else fp32."""

    def number(self, name: str, default: int, least: int = 1, most: int = 1 << 16) -> int:
        """An option that is a whole number. Raises ValueError for any other value."""
        value = self.options.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        return value

    def require_entry(self, *dimensions: str) -> Shape:
        """The shape of what comes in, if it has these dimensions. Raises ValueError."""
        if len(self.entry) != len(dimensions):
            wanted = " by ".join(dimensions)
            raise ValueError(f"reads {wanted}, and what comes in has the shape {list(self.entry)}")
        return self.entry


class LayerKind(ABC):
    """One kind. All methods must say the same of the same place on any machine."""

    options: frozenset[str] = frozenset()
    """Names of those that it knows; others are refused before it is asked anything."""

    @abstractmethod
    def boundary(self, place: Place) -> Shape:
        """Of what it gives on for one sequence; of the last layer, of its answer.

        Raises ValueError, whose text people read, where it cannot stand there.
        """

    @abstractmethod
    def build(self, place: Place) -> nn.Module:
        """The module, which maps [sequences, *entry] to [sequences, *boundary]; fp32. What its
        parameters are before the first step is not its affair, and it draws nothing.

        Its forward must give the same for the same input, whatever came before: no dropout, no
        running statistics.
        """

    @abstractmethod
    def costs(self, place: Place) -> Costs:
        """Whole numbers."""

    def loss_sum(self, answer: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        """Of the last layer: what is minimised, summed over all tokens of the microbatch.

        targets [sequences, tokens], int64. By default the answer is logits for each token.
        """
        require_answers(targets, answer.shape[-1])
        return token_loss_sum(answer, targets, z_loss)

    def deviation(self, name: str, shape: Shape) -> float:
        """Standard deviation of a matrix before the first step. Vectors are zero, and those whose
        name ends in `norm.weight` one. By default 1 / sqrt(inputs)."""
        return 1.0 / math.sqrt(math.prod(shape[1:]))


def require_answers(targets: Tensor, answers: int) -> None:
    """Raises `UserError` where one asks for an answer that a last layer has not: torch would end
    with an error of its own, and a card would compute nothing any more."""
    asked = int(targets.max())
    if asked >= answers:
        raise UserError(
            f"the data ask for the answer {asked}, and its last layer has {answers}",
            (
                "name the data that these layers are for (data.source of the run spec)",
                f"let the last table of [[layers]] have as many as there are, {asked + 1} at least",
            ),
        )
