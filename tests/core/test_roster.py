"""Of all records of a peer the same one counts, in whatever order and however often they are
heard."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.membership.roster import newer, newest_lives
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.snapshot import Member
from tests.core.builders import record

records = st.builds(
    lambda life, sequence, uplink: record(
        "a", life=life, sequence=sequence, uplink_bytes_per_s=uplink
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),  # so that a peer may sign two records of one version
)


@given(records, records)
def test_the_newer_is_commutative(left: PeerRecord, right: PeerRecord) -> None:
    assert newer(left, right) == newer(right, left)


@given(records, records, records)
def test_the_newer_is_associative(a: PeerRecord, b: PeerRecord, c: PeerRecord) -> None:
    assert newer(newer(a, b), c) == newer(a, newer(b, c))


@given(records, records)
def test_the_newer_is_idempotent(left: PeerRecord, right: PeerRecord) -> None:
    assert newer(left, left) == left
    assert newer(newer(left, right), right) == newer(left, right)


@given(records, records)
def test_a_lower_version_never_counts(left: PeerRecord, right: PeerRecord) -> None:
    found = newer(left, right)
    assert found in (left, right)
    assert found.version == max(left.version, right.version)


def test_a_newer_life_counts_whatever_its_sequence() -> None:
    old, new = record("a", life=1, sequence=900), record("a", life=2, sequence=1)
    assert newer(old, new) == newer(new, old) == new


def test_each_peer_counts_in_its_newest_life() -> None:
    named = [Member("a", 2), Member("a", 1), Member("b", 3), Member("b", 3)]
    for order in permutations(named):
        assert newest_lives(order) == {Member("a", 2), Member("b", 3)}
