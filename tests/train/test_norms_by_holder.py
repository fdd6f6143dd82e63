"""The squared norm of a segment, holder by holder: each states the norm of what it has summed."""

import torch

from p2p_dtfm.core.planner.wire_plan import Chunks
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.train.stage.replay.work import norms_by_holder
from p2p_dtfm.train.updates.exact_sums import squared_norm

CHUNKS = Chunks(((0, 40), (40, 70), (70, 150)), ("a", "b", "a"))
"""c has nothing to sum."""


def test_each_holder_s_is_of_the_chunks_that_it_sums() -> None:
    sums = torch.randn(150, generator=torch.Generator().manual_seed(1))
    chunks = [squared_norm(sums[start:end].clone()) for start, end in CHUNKS.bounds]
    found = norms_by_holder("abc", CHUNKS, sums)
    assert found == (chunks[0] + chunks[2], chunks[1], 0.0)
    assert abs(added_up(found) / squared_norm(sums) - 1.0) < 1e-14
