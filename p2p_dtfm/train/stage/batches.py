"""Token tensors of any microbatch, and the data shards that a peer needs for them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.data.dataset import Dataset


class Batches:
    """Gives microbatches by index. From `microbatches_per_step` on they are held out, equal in all
    steps."""

    def __init__(self, dataset: Dataset, spec: RunSpec) -> None:
        dataset.require_fits(spec)
        self._dataset = dataset
        self._spec = spec
        self._weighed = (-1, 1.0)
        """The last step that was weighed, and its weight."""
        self._held_out_weight: float | None = None
        """Computed once, as it is the same in each step: looking at all sequences for each of them
        would take their square."""

    def __call__(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [sequences, tokens]. Raises as `Dataset.microbatch` does."""
        held_out = index - self._spec.microbatches_per_step
        if held_out >= 0:
            inputs, targets = self._dataset.held_out_microbatch(self._spec, held_out)
        else:
            inputs, targets = self._dataset.microbatch(self._spec, step, index)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def weight(self, step: int, index: int) -> float:
        """The weight of a summed loss. It turns the mean over all tokens of the step, or of the
        evaluation, into one over the tokens that count; 1 if all do."""
        spec = self._spec
        if not self._dataset.manifest.sequence_tokens:
            return 1.0
        if index >= spec.microbatches_per_step:
            if self._held_out_weight is None:
                tokens = spec.evaluation.sequences * spec.model.context
                self._held_out_weight = tokens / self._dataset.held_out_counted(spec)
            return self._held_out_weight
        if step != self._weighed[0]:
            self._weighed = (step, spec.tokens_per_step / self._dataset.counted(spec, step))
        return self._weighed[1]

    def open_shards(self, digests: Iterable[str]) -> None:
        """Open and verify these shards, so that no step finds one missing or damaged."""
        self._dataset.open_shards(digests)

    def read_ahead(
        self, step: int, indices: Iterable[int], *, held_out: bool, of_another: bool = False
    ) -> None:
        """Read training microbatches, and evaluation, into memory: see `Dataset.read_ahead`."""
        self._dataset.read_ahead(
            self._spec, step, indices, held_out=held_out, of_another=of_another
        )

    def shards(self, step: int, indices: Iterable[int], *, held_out: bool) -> set[str]:
        """Digests of the shards that these training microbatches, and evaluation, read."""
        samples = [
            sample
            for index in indices
            for sample in self._dataset.sample_indices(self._spec, step, index)
        ]
        needed = self._dataset.shards_of(samples)
        return needed | self._dataset.held_out_shards(self._spec) if held_out else needed
