"""A member is suspected that does not say it is ready for the next view, though most are. A member
that hears of the view later than others is not."""

from p2p_dtfm.core.liveness.pace import SECOND_NS
from p2p_dtfm.core.liveness.vouches import PATIENCE_NS, STEPS_ENOUGH, Vouches
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.snapshot import ViewId

VIEW, NEXT, OTHER = (ViewId(number, "x") for number in (1, 2, 3))


def said(**ready_for: ViewId | None) -> list[Prepared]:
    return [
        Prepared(VIEW, 1, peer_id, {}, 1.0, 1, 0.0, 0, view) for peer_id, view in ready_for.items()
    ]


def suspected(
    vouches: Vouches, prepared: list[Prepared], next_view: ViewId, at_s: float
) -> set[str]:
    found = vouches.committed(prepared, next_view, int(at_s * SECOND_NS))
    return {suspicion.peer_id for suspicion in found}


def test_who_never_says_so_is_suspected_once_it_has_had_time() -> None:
    vouches, silent = Vouches(), said(a=NEXT, b=NEXT, c=NEXT, d=None)
    patience_s = PATIENCE_NS // SECOND_NS
    assert suspected(vouches, silent, NEXT, 1) == set()
    assert suspected(vouches, silent, NEXT, patience_s) == set()
    assert suspected(vouches, silent, NEXT, patience_s + 1) == {"d"}


def test_long_steps_are_not_held_against_it() -> None:
    vouches, silent = Vouches(), said(a=NEXT, b=NEXT, c=None)
    times = [suspected(vouches, silent, NEXT, 100 * step) for step in range(STEPS_ENOUGH)]
    assert times == [*[set()] * (STEPS_ENOUGH - 1), {"c"}]


def test_two_that_take_turns_are_both_suspected() -> None:
    vouches = Vouches()
    one, other = (
        said(a=NEXT, b=NEXT, c=NEXT, d=NEXT, e=None),
        said(a=NEXT, b=NEXT, c=NEXT, d=OTHER, e=NEXT),
    )
    found = [suspected(vouches, (one, other)[step % 2], NEXT, 10 * step) for step in range(7)]
    assert set().union(*found) == {"d", "e"} and not set().union(*found[:3])


def test_where_not_most_are_ready_nobody_is() -> None:
    vouches = Vouches()
    for step in range(20):
        assert suspected(vouches, said(a=NEXT, b=None), NEXT, 10 * step) == set()
        assert suspected(vouches, said(a=None, b=None, c=NEXT), NEXT, 10 * step) == set()


def test_another_view_begins_anew() -> None:
    vouches = Vouches()
    for step in range(20):
        next_view = (NEXT, OTHER)[step % 2]
        ready = said(a=next_view, b=next_view, c=None)
        assert suspected(vouches, ready, next_view, 100 * step) == set()
    assert vouches.committed(said(a=None, b=None), None, 0) == []
