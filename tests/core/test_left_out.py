"""A peer that is left out of a view cannot keep others from agreeing on it, whenever its word
arrives."""

from collections.abc import Iterable

import pytest

from p2p_dtfm.core.consensus.actions import Actions, ComputePlan, Report, SendMessage, TakeOver
from p2p_dtfm.core.liveness.liveness import Suspect
from p2p_dtfm.core.messages.agreement_messages import AgreementMessage
from tests.core.liars import one_pipeline, swarm


def to(name: str, actions: Actions) -> list[AgreementMessage]:
    """The messages that are said to this peer."""
    said = [it for it in actions if isinstance(it, SendMessage)]
    return [it.message for it in said if name in it.to]


def test_what_one_in_doubt_says_late_is_no_news() -> None:
    """Seen under much load: both others accused the peer, and neither waited for it. Its
    contribution came to one of them when the other was done, in one attempt after the other."""
    world = swarm(["a", "b", "s"])
    now_ns = world.peers["a"].now_ns
    a, b, s = (world.peers[name].agreement for name in "abs")
    opened = a.hold_up({"s": "completes nothing"}, now_ns)
    asked = to("b", opened)
    answers = [it for message in asked for it in b.receive("a", message, now_ns)]
    answers += b.hold_up({"s": "completes nothing"}, now_ns)
    late = [it for message in to("s", opened) for it in s.receive("a", message, now_ns)]

    settled = [it for message in to("a", answers) for it in a.receive("b", message, now_ns)]
    plans = [it for it in settled if isinstance(it, ComputePlan)]
    assert plans, "both know the same"
    grown = [it for message in to("b", late) for it in b.receive("s", message, now_ns)]
    after = [it for message in to("a", grown) for it in a.receive("b", message, now_ns)]
    assert not any(isinstance(it, Report) and "opens" in it.text for it in after)

    grown += [it for message in to("b", settled) for it in b.receive("a", message, now_ns)]
    plans += [it for it in [*answers, *grown] if isinstance(it, ComputePlan)]
    who = [[member.peer_id for member in plan.snapshot.members] for plan in plans]
    assert who == [["a", "b"], ["a", "b"]]
    ready = [
        agreement.plan_computed(plan.snapshot, one_pipeline(plan.snapshot), now_ns)
        for agreement, plan in zip((a, b), plans, strict=True)
    ]
    over = [it for message in to("b", ready[0]) for it in b.receive("a", message, now_ns)]
    assert any(isinstance(it, TakeOver) for it in over)


@pytest.mark.parametrize("found", [[("l", "m")], [("l",), ("m",)]], ids=["at once", "in turn"])
def test_who_finds_two_is_not_left_alone_with_the_second(found: list[tuple[str, ...]]) -> None:
    """Two liars let the others wait in each step. One member had seen enough of both, and the
    others sided with it against the liar that they heard of first. That member was then out with
    the second liar."""
    liars = {"l", "m"}

    def has_seen_half(doubted: Iterable[str], *_: object) -> list[Suspect]:
        return [Suspect(name, "is waited for") for name in sorted(liars & set(doubted))]

    world = swarm(["a", "b", "c", *sorted(liars), "z"])
    for name in "abc":
        waits = world.peers[name].waits

        waits.stalls.join = has_seen_half  # type: ignore[method-assign]
    finder = world.peers["z"]
    for names in found:
        finder.do(finder.agreement.hold_up(dict.fromkeys(names, "waited for"), finder.now_ns))
    before = world.peers["a"].view
    world.run_until(lambda: world.peers["a"].view is not before)
    view = world.peers["a"].view
    assert view is not None and view.member_ids == ("a", "b", "c", "z")
