"""A peer slept while its fellows went on: with whom it goes on when it wakes up."""

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from tests.core.liars import trains_on
from tests.core.test_agreement import same_view
from tests.core.test_split_swarms import FIVE, split, trained


def two_of_five_go_on(*, crashes: str = "a") -> AgreementWorld:
    """One of the others is gone for good, and two are asleep."""
    world = trained(FIVE)
    world.crash(crashes, lose_disk=True)
    for name in ("b", "c"):
        world.stop(name)
    world.run_until(lambda: same_view(world, ["d", "e"]), limit_s=60)
    trains_on(world, ["d", "e"])
    return world


def test_who_wakes_up_goes_to_more_of_its_fellows_and_not_on_alone() -> None:
    """Fewer than half of the view went on without the sleeper, but more than are left with it
    (agreement seed 4). It made a view alone, and committed steps anew that the others had
    committed."""
    world = two_of_five_go_on()
    world.go_on("c")
    woken_ns = world.now_ns
    world.run_until(lambda: same_view(world, ["c", "d", "e"]), limit_s=60)
    was_in = [view.member_ids for view in world.peers["c"].views]
    assert ("c",) not in was_in
    assert world.now_ns - woken_ns < 20 * SECOND_NS
    trains_on(world, ["c", "d", "e"])


def test_as_many_as_have_gone_on_go_with_the_longer_lineage() -> None:
    world = two_of_five_go_on()
    for name in ("b", "c"):
        world.go_on(name)
    world.run_until(lambda: same_view(world, ["b", "c", "d", "e"]), limit_s=60)
    was_in = {view.member_ids for name in "bc" for view in world.peers[name].views}
    assert was_in.isdisjoint({("b",), ("c",), ("b", "c")})


def test_who_has_heard_of_fewer_goes_on_with_more() -> None:
    """A peer that was alone for a while gives nobody a reason to give up a view of three."""
    world = trained(FIVE)
    world.crash("a", lose_disk=True)
    heal = split(world, ["e"], ["b", "c", "d"])
    world.run_until(lambda: same_view(world, ["e"]) or world.peers["e"].view is None, limit_s=60)
    heal()
    world.run_until(lambda: same_view(world, ["b", "c", "d", "e"]), limit_s=60)
    lives = {name: world.peers[name].record.life for name in "bcd"}
    assert set(lives.values()) == {1}
