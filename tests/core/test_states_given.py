"""Which progress of a newcomer counts."""

from p2p_dtfm.core.membership.states_given import StatesGiven
from p2p_dtfm.core.protocol.snapshot import Member

A, B = Member("a", 1), Member("b", 1)


def test_a_byte_now_and_then_is_no_progress() -> None:
    given = StatesGiven()
    given.begin({"new": 1600})
    given.note(A, {"new": 1}, now_ns=5)
    assert given.grown_ns("new") == 5, "it has begun"
    for now_ns, size in ((6, 40), (7, 100)):
        given.note(A, {"new": size}, now_ns)
    assert given.grown_ns("new") == 5
    given.note(B, {"new": 1}, now_ns=8)
    assert given.grown_ns("new") == 8, "a sixteenth, from two that give"
    given.note(A, {"new": 100}, now_ns=9)
    assert given.grown_ns("new") == 8, "said before"


def test_of_who_needs_nothing_known_each_word_counts() -> None:
    given = StatesGiven()
    given.begin()
    for now_ns in (1, 2):
        given.note(A, {"new": now_ns}, now_ns)
        assert given.grown_ns("new") == now_ns
