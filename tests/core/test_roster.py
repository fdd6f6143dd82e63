"""Merging rosters in any order, any grouping and any number of times gives one roster."""

from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.membership.roster import is_news, merge
from p2p_dtfm.core.protocol.records import PeerRecord
from tests.core.builders import record

records = st.builds(
    lambda peer, life, sequence, uplink: record(
        peer, life=life, sequence=sequence, uplink_bytes_per_s=uplink
    ),
    st.sampled_from(["a", "b", "c"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),  # so that a peer may sign two records of one version
)
rosters = st.lists(records, max_size=8).map(lambda found: merge({}, found))


@given(rosters, rosters)
def test_merge_is_commutative(left: dict, right: dict) -> None:
    assert merge(left, right.values()) == merge(right, left.values())


@given(rosters, rosters, rosters)
def test_merge_is_associative(a: dict, b: dict, c: dict) -> None:
    assert merge(merge(a, b.values()), c.values()) == merge(a, merge(b, c.values()).values())


@given(rosters)
def test_merge_is_idempotent(roster: dict) -> None:
    assert merge(roster, roster.values()) == roster


@given(rosters, records)
def test_a_lower_or_equal_version_is_never_news(roster: dict, found: PeerRecord) -> None:
    held = roster.get(found.peer_id)
    merged = merge(roster, [found])
    if held is not None and found.version < held.version:
        assert merged == roster
    if held is not None and found.version <= held.version:
        assert not is_news(roster, found)
    if held is None or found.version > held.version:
        assert is_news(roster, found)
        assert merged[found.peer_id] == found


def test_a_newer_life_counts_whatever_its_sequence() -> None:
    old, new = record("a", life=1, sequence=900), record("a", life=2, sequence=1)
    assert merge({"a": old}, [new]) == {"a": new}
    assert merge({"a": new}, [old]) == {"a": new}


@given(rosters, st.lists(records, max_size=4))
def test_merge_leaves_its_argument_alone(roster: dict, found: list) -> None:
    before = dict(roster)
    merge(roster, found)
    assert roster == before
