"""One step of a layer's parameters: AdamW, or Muon for the matrices of blocks and AdamW for the
rest (`optimizer.kind`).

Muon (Jordan et al. 2024) takes the momentum of a matrix's gradient and makes it orthogonal, so that
all directions are learnt alike. Matrices that lie in one tensor because they read the same input
(queries, keys and values; gate and value) are taken one by one. Embedding, head, norms and biases
are AdamW's.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.updates.adam_w import AdamW, rounded
from p2p_dtfm.train.updates.orthogonal import exactly_orthogonal, orthogonal

Shapes = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of a layer's tensors, in the order in which they lie in the buffers."""


class Matrix(NamedTuple):
    """A matrix that Muon updates: `rows` x `columns` elements from `start` on."""

    start: int
    rows: int
    columns: int

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.rows * self.columns)


class Rest(NamedTuple):
    """Neighbouring tensors that AdamW updates."""

    start: int
    shapes: list[tuple[int, ...]]

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + sum(map(math.prod, self.shapes)))


def divided(spec: RunSpec, layer: int, shapes: Shapes) -> tuple[list[Matrix], list[Rest]]:
    """The parts of a layer that Muon updates, and those that AdamW updates."""
    is_block = 0 < layer <= spec.model.layers
    if spec.optimizer.kind == "adamw" or not is_block:
        return [], [Rest(0, [shape for _, shape in shapes])]
    matrices: list[Matrix] = []
    rest: list[Rest] = []
    start, end_of_rest = 0, -1
    for name, shape in shapes:
        if len(shape) >= 2:
            rows_end = start
            for rows in _rows_of_each(spec.model, name, shape[0]):
                matrices.append(Matrix(rows_end, rows, shape[1]))
                rows_end += rows * shape[1]
        else:
            if start != end_of_rest:
                rest.append(Rest(start, []))
            rest[-1].shapes.append(shape)
            end_of_rest = start + math.prod(shape)
        start += math.prod(shape)
    return matrices, rest


def is_spared(spec: RunSpec, layer: int) -> bool:
    """Whether the matrices of a layer do not decay: an embedding's, and a head's tied to it."""
    if spec.layers:
        return spec.layers[layer].kind == "embedding" and not spec.optimizer.decay_embeddings
    ends = {0, spec.model.layers + 1} if spec.model.tied_head else {0}
    return layer in ends and not spec.optimizer.decay_embeddings


def _rows_of_each(model: ModelSpec, name: str, rows: int) -> list[int]:
    """The rows of each of the matrices that lie in one tensor, one below another."""
    if name == "attention_input.weight":
        return [model.query_width, model.key_width, model.key_width]
    if name == "feed_forward_input.weight" and model.feed_forward != "gelu":
        return [rows // 2, rows // 2]
    return [rows]


def second_moment_count(spec: RunSpec, layer: int, shapes: Shapes) -> int:
    """How many elements have a second moment: AdamW's alone, as Muon keeps none."""
    _, rest = divided(spec, layer, shapes)
    return sum(sum(map(math.prod, each.shapes)) for each in rest)


class LayerUpdate:
    """Steps of one layer.

    `moments`: fp32, changed in place. The first are of all elements. The second are either as many,
    with zeros for Muon's matrices, or those of AdamW's elements alone, one after another. `exact`:
    to the same last bit on any device, at the price of float64.
    """

    def __init__(
        self,
        spec: RunSpec,
        layer: int,
        shapes: Shapes,
        moments: tuple[Tensor, Tensor],
        steps_made: int,
        exact: bool,
    ) -> None:
        self.steps_made = steps_made
        self._settings = spec.optimizer
        self._orthogonal = exactly_orthogonal if exact else orthogonal
        first, second = moments
        self._first = first
        self._matrices, rest = divided(spec, layer, shapes)
        self.rest = [each.place for each in rest]
        """The places that AdamW updates."""
        where = self.rest
        if second.numel() < first.numel():
            ends = [0]
            for place in self.rest:
                ends.append(ends[-1] + place.stop - place.start)
            where = [slice(*edges) for edges in pairwise(ends)]
        decay = 0.0 if is_spared(spec, layer) else None
        self._adam_w = [
            AdamW(spec, each.shapes, (first[each.place], second[there]), steps_made, decay)
            for each, there in zip(rest, where, strict=True)
        ]

    @torch.no_grad()
    def step(self, parameters: Tensor, gradient: Tensor, learning_rate: float) -> None:
        """Change `parameters`, fp32 [elements], in place. `gradient` is used up."""
        self.steps_made += 1
        for place, adam_w in zip(self.rest, self._adam_w, strict=True):
            adam_w.step(parameters[place], gradient[place], learning_rate)
        muon = self._settings.muon
        peaks = muon.peak_learning_rate / self._settings.peak_learning_rate
        rate = rounded(learning_rate * peaks)
        for matrix in self._matrices:
            place, shape = matrix.place, (matrix.rows, matrix.columns)
            slope, momentum, value = gradient[place], self._first[place], parameters[place]
            momentum.mul_(muon.momentum).add_(slope)
            slope.add_(momentum * muon.momentum)
            direction = self._orthogonal(slope.view(shape)).reshape(-1)
            longer = math.sqrt(max(1.0, matrix.rows / matrix.columns))
            value.mul_(1.0 - rate * muon.weight_decay)
            value.sub_(direction.mul_(rate * longer))
