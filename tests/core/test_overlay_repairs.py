"""The overlay of a swarm of many: what is lost on its way comes after all, and members in doubt
hear of everything."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.consensus.attempts import message_parts
from p2p_dtfm.core.membership.accusers import UNANSWERED_LIMIT
from p2p_dtfm.core.messages.agreement_messages import Gather, Spread, Tidings
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from tests.core.builders import WORKLOAD, record
from tests.core.liars import are_together, one_pipeline, trains_on, view_of

NAMES = ["a", "b", "c", "d", "e", "f"]
Loses = Callable[[str, str, Any], bool]


class OverlayWorld(AgreementWorld):
    """An agreement world in which `loses` says which messages never arrive."""

    loses: Loses = staticmethod(lambda sender, receiver, message: False)

    def send(self, sender: str, receiver: str, message: Any) -> None:
        if not self.loses(sender, receiver, message):
            super().send(sender, receiver, message)


def many(names: Sequence[str] = NAMES) -> OverlayWorld:
    world = OverlayWorld(
        1, WORKLOAD, record("template"), one_pipeline, timing=replace(TIMING, wide_above=3)
    )
    world.rejoins = True
    for name in names:
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    world.after(3 * SECOND_NS, lambda: world.found("a"))
    world.run_until(lambda: are_together(world, list(names)))
    trains_on(world, list(names))
    for peer in world.peers.values():
        peer.agreement._state.attempts.failures = 1  # the next attempt is in no haste
    return world


def test_an_accusation_that_is_lost_on_its_way_is_told_again() -> None:
    """Without that accusation one member knows something else than all others, for as long as the
    attempt takes."""
    world, lost = many(), set[tuple[Member, Member]]()
    before = view_of(world, "a").id.number

    def loses(sender: str, receiver: str, message: Any) -> bool:
        if receiver != "e" or not isinstance(message, Spread):
            return False
        said = {(it.accusation.by, it.accusation.of) for it in message.accusations}
        first = bool(said - lost)
        lost.update(said)
        return first

    world.loses = loses
    world.cut({("b", "c"), ("c", "b")}, "one link")

    def in_next() -> bool:
        views = [peer.view for peer in world.peers.values() if peer.name not in "bc"]
        return all(view is not None and view.id.number > before for view in views)

    world.run_until(in_next, limit_s=20)
    assert lost
    assert {view_of(world, name).id.number for name in "adef"} == {before + 2}


def test_who_is_in_doubt_hears_what_all_others_hear() -> None:
    """A member in doubt may be right, or alive. Otherwise it calls all those silent that do not
    speak with it."""
    world = many()
    doubted = world.peers["b"].agreement.me
    for name in "acde":
        world.peers[name].agreement._state.distrust_members({doubted})
    world.loses = lambda sender, receiver, message: (
        isinstance(message, Spread) and bool(message.wants)
    )
    world.crash("f", lose_disk=False)
    world.run_until(lambda: world.peers["b"].agreement._state.attempt is not None)

    def knows_all() -> bool:
        attempt = world.peers["b"].agreement._state.attempt
        return attempt is not None and {it.peer_id for it in attempt.known} == set("abcde")

    world.run_until(knows_all, limit_s=1)


def test_members_that_keep_their_promise_are_not_thrown_out() -> None:
    """A member that has said in its Prepared that it waits for another view answers no attempt
    before that step commits. Two such attempts within a minute had the member out, with its layers.
    Among few members, three in a row with a step between each did."""
    world = many()
    before = view_of(world, "a").id
    world.loses = lambda sender, receiver, message: (
        isinstance(message, Gather | Spread) and bool({sender, receiver} & {"e", "f"})
    )
    for newcomer in ("n", "o"):
        world.add_peer(newcomer)
        world.ask_to_join(newcomer, "a")
    accusers = world.peers["a"].agreement._state.doubts.accusers
    times = lambda: max((times for times, _ in accusers._unanswered.values()), default=0)  # noqa: E731
    world.run_until(lambda: times() == UNANSWERED_LIMIT - 1, limit_s=60)
    world.run_to(world.now_ns + SECOND_NS)
    assert {peer.view.id for peer in world.peers.values() if peer.view} == {before}


def test_a_newcomer_that_has_not_heard_who_is_active_asks_for_it() -> None:
    """The newcomer had heard Synced of all members, and asked for nothing more. No step committed
    until it was taken for a member that stands still."""
    names = [*"abcdefghijklmopqrstuvwxyz"]
    world, until_ns = many(names), 0

    def loses(sender: str, receiver: str, message: Any) -> bool:
        nonlocal until_ns
        if receiver != "n" or not isinstance(message, Tidings) or not message.active:
            return False
        until_ns = until_ns or world.now_ns + 2 * SECOND_NS
        return world.now_ns < until_ns

    newcomer = world.add_peer("n")
    world.ask_to_join("n", "a")
    world.run_until(lambda: newcomer.agreement.next_view is not None, limit_s=20)
    world.loses = loses
    view = newcomer.agreement.next_view
    assert view is not None
    world.run_until(lambda: bool(until_ns), limit_s=20)
    world.run_until(lambda: newcomer.view is not None and newcomer.view.id == view.id, limit_s=4)
    trains_on(world, [*names, "n"])
    assert {view_of(world, name).id for name in [*names, "n"]} == {view.id}


@pytest.mark.parametrize("late", ["proofs", "all else"])
def test_a_newcomer_comes_in_by_what_it_is_told_in_parts_in_whatever_order_they_come(
    late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part names the newcomer, and another part proves the namer's view. Where a hundred came,
    some waited for a second, and everybody waited for them."""
    monkeypatch.setattr(message_parts, "PART_LIMIT_BYTES", 2048)
    world = many()
    for peer in world.peers.values():
        peer.agreement._state.attempts.failures = 0
    asked = list[str]()

    def comes_late(sender: str, receiver: str, message: Any) -> bool:
        if not isinstance(message, Spread):
            return False
        asked.extend(message.wants)
        if receiver != "n" or bool(message.certificates) != (late == "proofs"):
            return False
        world.after(SECOND_NS // 5, lambda: AgreementWorld.send(world, sender, "n", message))
        return True

    world.loses = comes_late
    newcomer = world.add_peer("n").agreement
    world.add_peer("first")
    world.ask_to_join("first", "a")  # a opens the attempt, and names this one
    world.run_to(world.now_ns + SECOND_NS // 4)
    world.ask_to_join("n", "f")
    world.run_until(lambda: newcomer.next_view is not None, limit_s=20)
    assert "first" in newcomer.next_view.member_ids
    assert asked == []
