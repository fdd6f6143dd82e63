"""The squared norm of a segment, holder by holder: each states that of what it has summed."""

import torch

from p2p_dtfm.core.planner.wire_plan import Chunks
from p2p_dtfm.core.protocol.plan import Segment
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.train.stage.replay.work import norms_by_holder
from p2p_dtfm.train.updates.exact_sums import squared_norm

SEGMENT = Segment(3, 5, ("a", "b", "c"))
CHUNKS = Chunks(((0, 40), (40, 70), (70, 150)), ("a", "b", "a"))
"""The second lies on both layers; nothing is c's to sum."""


def test_each_holder_s_is_of_the_chunks_that_it_sums_wherever_layers_end() -> None:
    whole = torch.randn(150, generator=torch.Generator().manual_seed(1))
    reduced = {3: whole[:60], 4: whole[60:]}
    chunks = [squared_norm(whole[start:end]) for start, end in CHUNKS.bounds]
    found = norms_by_holder(SEGMENT, CHUNKS, reduced)
    assert found == (chunks[0] + chunks[2], chunks[1], 0.0)
    assert abs(added_up(found) / squared_norm(whole) - 1.0) < 1e-14
