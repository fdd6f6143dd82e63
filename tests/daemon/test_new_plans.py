"""When news of links is worth a new plan, and that one new plan is made of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.protocol.records import Link
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, Snapshot
from p2p_dtfm.daemon.node.background.replanning import Replanning
from p2p_dtfm.daemon.peers.self_record import THIN_BYTES_PER_S, LinkNews, SelfRecord
from tests.core.builders import device, record
from tests.core.liars import WORKLOAD, swarm

FAST = 20 * THIN_BYTES_PER_S


@pytest.mark.parametrize(
    ("measured", "mine", "theirs", "news"),
    [
        pytest.param(FAST, None, None, LinkNews.MEASURED, id="nobody had measured it"),
        pytest.param(FAST, FAST // 3, None, None, id="load makes rates waver"),
        pytest.param(FAST, FAST // 5, None, LinkNews.CHANGED, id="by far another"),
        pytest.param(FAST, None, FAST // 3, None, id="the other direction was a good guess"),
        pytest.param(FAST // 5, None, FAST, LinkNews.CHANGED, id="fast either way"),
        pytest.param(THIN_BYTES_PER_S - 1, None, FAST, LinkNews.MEASURED, id="a thin line"),
    ],
)
def test_news_of_links(
    measured: int, mine: int | None, theirs: int | None, news: LinkNews | None
) -> None:
    def links(peer_id: str, rate: int | None) -> dict[str, Link]:
        return {} if rate is None else {peer_id: Link(1, rate)}

    records = (record("a", links=links("b", mine)), record("b", links=links("a", theirs)))
    members = (Member("a", 1), Member("b", 1))
    own = SelfRecord(members[0], "00" * 32, device(), (), None)  # type: ignore[arg-type]
    own._links["b"] = Link(1, measured)
    snapshot = Snapshot("run", WORKLOAD, 1, GENESIS, True, records, members, (), 0, None)
    assert own.news_to(snapshot) is news


def test_what_two_have_seen_at_once_makes_one_view() -> None:
    """Each of eight daemons asked. Each did so a moment after another had opened the view that
    already had it all, so every new plan was agreed on twice."""
    world = swarm(["a", "b", "c"])
    before = world.peers["a"].agreement.view.id.number
    a, b = world.peers["a"], world.peers["b"]
    a.do(a.agreement.request_replan("a step takes 261 ms", a.now_ns))
    world.run_until(lambda: b.agreement.attempting)
    b.do(b.agreement.request_replan("a step takes 256 ms", b.now_ns))
    world.run_to(world.now_ns + 30 * SECOND_NS)
    numbers = {peer.agreement.view.id.number for peer in world.peers.values()}
    assert len(numbers) == 1
    assert numbers.pop() <= before + 2


@pytest.mark.parametrize("is_outside", [False, True])
def test_whom_the_others_have_left_says_nothing_of_their_plan(is_outside: bool) -> None:
    """While it waited for room on its disk, its user was told that the members plan anew."""
    world, told = swarm(["a", "b", "c"]), list[str]()
    agreement = world.peers["a"].agreement
    agreement._state.joining.is_outside = is_outside
    slow = SimpleNamespace(reason=None, why_anew=lambda: "a step takes 261 ms")
    own, none = device(), SimpleNamespace(look=lambda is_late: None, told=dict)
    loop = Replanning.__new__(Replanning)
    parts: dict[str, Any] = {
        "_agreement": agreement,
        "_membership": SimpleNamespace(
            me=agreement.me,
            plan_times=slow,
            self_record=SimpleNamespace(
                device=own, measured_device=own, state_paces=lambda paces: ()
            ),
        ),
        "_participant": SimpleNamespace(trainer=SimpleNamespace(seen_paces=none)),
        "_local": SimpleNamespace(tell=told.append),
        "_do": lambda actions: None,
    }
    loop.__dict__.update(parts)
    loop.if_slow()
    assert bool(told) != is_outside
