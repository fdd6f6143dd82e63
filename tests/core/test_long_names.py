"""Names of lineages are short, and nothing is kept of those that strangers make up."""

import tracemalloc

import msgspec
import pytest

from p2p_dtfm.core.consensus.views.view_precedence import proven_step
from p2p_dtfm.core.messages.agreement_messages import Standing
from p2p_dtfm.core.messages.prepared import Prepared, open_prepared, sign_prepared
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.lineage import Epochs, epochs_of, marked
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from tests.core.liars import EVIL, self_made_view, standing

KIB = 1 << 10


def test_what_a_strangers_commit_names_is_not_kept() -> None:
    """Each of the stranger's Prepared named another lineage, 16 KiB long, and 4,096 of them stayed
    for ever."""
    said = standing(self_made_view((EVIL,), 9), 9)
    tracemalloc.start()
    for number in range(32):
        with_long_names = _with_bases(said, [f"{number} {n}".ljust(15 * KIB) for n in range(16)])
        assert proven_step(with_long_names, verify) == 0
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 1024 * KIB


def _with_bases(said: Standing, bases: list[str]) -> Standing:
    commit = []
    for base in bases:
        prepared = Prepared(said.view, 8, "evil", {}, 0.0, 0, 0.0, 0, None, base)
        commit.append(sign_prepared(prepared, sign_for("evil")))
    return msgspec.structs.replace(said, commit=tuple(commit))


def test_the_longest_name_that_there_is_counts_and_no_longer_one() -> None:
    starts = tuple(10**15 - 1 - n for n in range(8))
    longest = marked("f" * 64, Epochs(10**9 - 1, starts))
    assert epochs_of(longest) == Epochs(10**9 - 1, starts)
    assert epochs_of(longest + "f" * 256) == Epochs()
    said = Prepared(ViewId(1, "v"), 8, "evil", {}, 0.0, 0, 0.0, 0, None, longest)
    assert open_prepared(sign_prepared(said, sign_for("evil")), verify) == said
    longer = msgspec.structs.replace(said, base=longest + "f" * 256)
    with pytest.raises(PeerFault, match="no such name"):
        open_prepared(sign_prepared(longer, sign_for("evil")), verify)
