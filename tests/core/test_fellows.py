"""For whom a returning peer waits, and when it goes on from its own disk."""

import pytest

from p2p_dtfm.core.membership.fellows import hold_back, is_worth_a_return, missing_fellows
from p2p_dtfm.core.messages.agreement_messages import KnownView
from p2p_dtfm.core.protocol.snapshot import Member, ViewId


def view(number: int, *names: str) -> KnownView:
    return KnownView(ViewId(number, "view"), tuple(Member(name, 1) for name in names), "plan")


def test_it_waits_for_those_of_the_newest_view_that_are_not_here() -> None:
    history = (view(1, "a", "b", "c", "d"), view(3, "a", "b", "c"))
    assert missing_fellows(history, "a", ()) == ("b", "c")
    assert missing_fellows(history, "a", ("c", "x")) == ("b",)
    assert missing_fellows((*history, view(5, "a")), "a", ()) == ()
    assert missing_fellows((), "a", ()) == (), "it never was in a view"


def test_only_who_trains_alone_and_far_behind_is_worth_a_return() -> None:
    assert is_worth_a_return(593, 300, members=1, every_steps=100)
    assert not is_worth_a_return(593, 300, members=2, every_steps=100), "they count more"
    assert not is_worth_a_return(593, 300, members=0, every_steps=100), "it waits to be joined"
    assert not is_worth_a_return(400, 300, members=1, every_steps=100)


@pytest.mark.parametrize(
    ("others", "unlike", "alike", "holds"),
    [
        ("bcdefghij", "b", "", False),  # nine are updated
        ("bcdefghij", "bcdef", "", True),
        ("bc", "c", "", True),  # b may be with c
        ("bc", "c", "b", False),
        ("bc", "bc", "b", True),  # b was seen to be of another version since it asked
        ("b", "b", "", True),
        ("b", "x", "", False),  # a key that was never in that view
        ("", "", "", False),
    ],
)
def test_those_of_another_version_hold_back_where_they_may_train_on(
    others: str, unlike: str, alike: str, holds: bool
) -> None:
    assert hold_back(set(others), set(unlike), set(alike)) is holds
