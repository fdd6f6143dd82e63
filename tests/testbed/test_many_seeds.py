"""Seeds in several processes."""

from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual.seeds.many import several_at_a_time


@pytest.mark.nightly
def test_processes_that_cannot_begin_are_an_error_and_not_begun_again_for_ever(
    tmp_path: Path,
) -> None:
    with pytest.raises(BrokenProcessPool):
        list(several_at_a_time(2, tmp_path / "is not there", [0, 1], None, float("inf")))
