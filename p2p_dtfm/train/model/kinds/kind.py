"""What a kind of layer is, and what whoever adds one has to define."""

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
"""Shape of one sequence's tensor. A microbatch's tensor has the number of sequences before it."""
STANDARD_DEVIATION = 0.02
"""GPT-2's standard deviation."""


class Costs(NamedTuple):
    """Costs of one sequence. Layers are weighed by them before any device has been measured."""

    saved_values: int
    """Values that autograd keeps between a forward and its backward."""
    forward_flops: int


class Place(NamedTuple):
    """Where a layer stands in a run."""

    model: ModelSpec
    """`[model]` of the run: the values that a kind's options do not state."""
    options: Mapping[str, Option]
    """Options of this layer's table: whole numbers, words, yes or no."""
    entry: Shape
    """Shape of the layer's input for one sequence."""
    is_first: bool
    """Whether the input is token numbers, int64; else it is fp32."""

    def number(self, name: str, default: int, least: int = 1, most: int = 1 << 16) -> int:
        """An option that is a whole number. Raises ValueError for any other value."""
        value = self.options.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        return value

    def require_entry(self, *dimensions: str) -> Shape:
        """The shape of the input, if it has these dimensions. Raises ValueError."""
        if len(self.entry) != len(dimensions):
            wanted = " by ".join(dimensions)
            raise ValueError(f"reads {wanted}, and what comes in has the shape {list(self.entry)}")
        return self.entry


class LayerKind(ABC):
    """One kind. For the same place all methods must give the same on any machine."""

    options: frozenset[str] = frozenset()
    """Names of the options that the kind knows. Others are refused before any method is called."""

    @abstractmethod
    def boundary(self, place: Place) -> Shape:
        """Shape of what the layer passes on for one sequence; for the last layer, of its answer.

        Raises ValueError, whose text people read, if the layer cannot stand there.
        """

    @abstractmethod
    def build(self, place: Place) -> nn.Module:
        """The module, which maps [sequences, *entry] to [sequences, *boundary]; fp32. It draws
        nothing: its parameters before the first step are set elsewhere.

        Its forward must give the same for the same input, whatever came before: no dropout, no
        running statistics.
        """

    @abstractmethod
    def costs(self, place: Place) -> Costs:
        """Whole numbers."""

    def loss_sum(self, answer: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        """The loss of the last layer's answer, which is minimised: summed over all tokens of the
        microbatch.

        targets [sequences, tokens], int64. By default the answer is logits for each token.
        """
        require_answers(targets, answer.shape[-1])
        return token_loss_sum(answer, targets, z_loss)

    def deviation(self, name: str, shape: Shape) -> float:
        """Standard deviation of a matrix before the first step. By default 1 / sqrt(inputs).
        Vectors and single numbers are zero, and those whose name ends in `norm.weight` are
        one."""
        return 1.0 / math.sqrt(math.prod(shape[1:]))


def require_answers(targets: Tensor, answers: int) -> None:
    """Raises `UserError` if a target asks for an answer that the last layer does not have. Torch
    would end with an error of its own, and a card would then compute nothing any more."""
    asked = int(targets.max())
    if asked >= answers:
        raise UserError(
            f"the data ask for the answer {asked}, and its last layer has {answers}",
            (
                "name the data that these layers are for (data.source of the run spec)",
                f"let the last table of [[layers]] have as many as there are, {asked + 1} at least",
            ),
        )
