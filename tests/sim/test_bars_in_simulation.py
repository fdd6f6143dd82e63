"""A convicted member gets no place through crashes and restarts, and nobody bars an honest member
by saying so."""

import msgspec
import pytest

from p2p_dtfm.core.audit.roles import NEW
from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.consensus.parts.gather import contributing
from p2p_dtfm.core.membership.bars import BARS_LIMIT
from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, ViewId
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from tests.core.builders import record
from tests.sim.test_lying_members import MANY_MICROBATCHES, MEMBERS, replicas

BARRED = "d"
HONEST = ("a", "b", "c")
BAR = Bar(ViewId(3, "ab" * 32), 7, BARRED, 1, 100_000, "works otherwise")
EIGHT = tuple("abcdefgh")


def swarm(seed: int, names: tuple[str, ...]) -> AgreementWorld:
    world = AgreementWorld(seed, MANY_MICROBATCHES, record("template"), replicas, timing=TIMING)
    for name in names:
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    return world


def begin(world: AgreementWorld, names: tuple[str, ...], waits_for: tuple[str, ...]) -> None:
    world.after(3 * SECOND_NS, lambda: world.found("a"))
    for name in names[1:]:
        world.ask_to_join(name, "a")
    world.run_until(lambda: all(world.peers[it].agreement.step >= 1 for it in waits_for))


def members(world: AgreementWorld, name: str) -> tuple[str, ...]:
    view = world.peers[name].view
    return view.member_ids if view is not None else ()


@pytest.mark.parametrize("seed", range(4))
def test_those_that_remember_let_it_in_neither_at_the_beginning_nor_after_crashes(
    seed: int,
) -> None:
    world = swarm(seed, tuple(MEMBERS))
    for name in HONEST:
        world.peers[name].agreement.recall_bars((BAR,))
    begin(world, tuple(MEMBERS), HONEST)
    assert all(members(world, name) == HONEST for name in HONEST)
    world.crash("c", lose_disk=seed % 2 == 1)
    world.after(3 * SECOND_NS, lambda: world.restart("c"))
    world.crash(BARRED, lose_disk=False)
    world.after(4 * SECOND_NS, lambda: world.restart(BARRED))
    world.run_until(lambda: "c" not in members(world, "a"))
    world.run_until(lambda: members(world, "a") == members(world, "c") == HONEST)
    world.run_to(world.now_ns + 60 * SECOND_NS)
    for name in HONEST:
        peer = world.peers[name]
        assert members(world, name) == HONEST
        assert peer.agreement.bars == (BAR,), "who lost its disk was told by its first view"
        assert not any(BARRED in view.member_ids for view in peer.views)


def test_a_view_has_nobody_that_is_in_it_forgotten_by_who_knows_of_many_others() -> None:
    new = Bar(GENESIS, 7, "c", 0, 57, NEW)
    others = tuple(Bar(GENESIS, 8, f"key-{n:03}", 0, 58 + n, NEW) for n in range(BARS_LIMIT))
    world = swarm(0, tuple(MEMBERS))
    for name in MEMBERS:
        world.peers[name].agreement.recall_bars(others if name == "d" else (new,))
    begin(world, tuple(MEMBERS), tuple(MEMBERS))
    for name in MEMBERS:
        assert new in world.peers[name].agreement.bars


def test_without_a_bar_it_is_a_member() -> None:
    """Otherwise the test above could not fail."""
    world = swarm(0, tuple(MEMBERS))
    begin(world, tuple(MEMBERS), tuple(MEMBERS))
    world.run_until(lambda: members(world, "a") == tuple(MEMBERS))


@pytest.mark.parametrize("seed", range(4))
def test_a_quarter_that_bars_honest_members_by_its_word_bars_nobody(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    liars = ("g", "h")
    false = tuple(msgspec.structs.replace(BAR, peer_id=name) for name in "abc")

    def lying(**facts: object) -> Contribution:
        part = Contribution(**facts)  # type: ignore[arg-type]
        return msgspec.structs.replace(part, bars=false) if part.member.peer_id in liars else part

    monkeypatch.setattr(contributing, "Contribution", lying)
    world = swarm(seed, EIGHT)
    begin(world, EIGHT, EIGHT)
    world.run_until(lambda: members(world, "a") == EIGHT)
    world.crash("f", lose_disk=False)
    world.run_until(lambda: "f" not in members(world, "a"))
    step = world.peers["a"].agreement.step
    world.run_until(lambda: all(world.peers[it].agreement.step >= step + 5 for it in "abcde"))
    for name in "abcde":
        assert set("abcde") <= set(members(world, name))
        assert world.peers[name].agreement.bars == ()
