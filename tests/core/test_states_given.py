"""Which words of a newcomer's progress count."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.consensus.parts.syncing import Syncing
from p2p_dtfm.core.membership import states_given
from p2p_dtfm.core.membership.states_given import StatesGiven
from p2p_dtfm.core.messages.agreement_messages import Heartbeat
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


def test_a_member_that_gives_to_names_it_made_up_leaves_room_for_true_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody heard any more that a newcomer got on, and all refused it. Each made-up word was added
    up with all others."""
    monkeypatch.setattr(states_given, "WORDS_LIMIT", 256)
    agreed = SimpleNamespace(synced=set(), given=StatesGiven())
    view = SimpleNamespace(members=(A, B, Member("new", 1)), snapshot=SimpleNamespace(step=5))
    state: Any = SimpleNamespace(is_newcomer=False, members=(A, B), next_view=view, agreed=agreed)
    syncing = Syncing(state, None)  # type: ignore[arg-type]
    for beat in range(10):
        made_up = {f"{beat} {number}": 1 for number in range(100)}
        syncing.note_progress(Heartbeat(A, beat, gives=made_up), beat)
    syncing.note_progress(Heartbeat(B, 0, gives={"new": 10, "b": 1}), 20)
    assert agreed.given.grown_ns("new") == 20
    assert agreed.given.grown_ns("b") is None, "it is a member already"
