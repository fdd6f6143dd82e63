"""Real daemons in virtual time: a member says to some that it is ready for the next view, and to
others that it is not. The ones took that view over and waited there for the others. All stood still
for eight seconds, and honest members were out. Where one alone had taken the view over with the
liar, both were, and the liar was back after two seconds, to do it again."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.in_words import be_ready_for
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.lies.putting import put_in
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import agreement_of, are_in_views_of, begun

KIND = "unlike-vouches"
STEPS = 400
FOLLOW_STEPS = 5
SOON_S = 1.0
NEWCOMER_S = 8.0
"""Where few have taken the view over, the newcomer cannot: all wait for it like for any silent
one."""


def all_but_one(honest: Sequence[str]) -> Sequence[str]:
    return honest[1:]


def one_alone(honest: Sequence[str]) -> Sequence[str]:
    return honest[:1]


@pytest.mark.parametrize(
    ("names", "liars", "chosen", "within_s", "rate"),
    [
        ("abcd", "d", all_but_one, SOON_S, 0.02),
        ("abcd", "d", one_alone, NEWCOMER_S, 0.02),
        pytest.param("abcd", "d", all_but_one, SOON_S, 0.0, marks=pytest.mark.nightly),
        pytest.param("abcdefgh", "gh", all_but_one, SOON_S, 0.02, marks=pytest.mark.nightly),
        pytest.param("abcdefgh", "gh", one_alone, NEWCOMER_S, 0.02, marks=pytest.mark.nightly),
    ],
)
def test_who_is_ready_for_some_alone_goes_and_no_honest_one_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: str,
    liars: str,
    chosen: object,
    within_s: float,
    rate: float,
) -> None:
    monkeypatch.setitem(INSTALLED, KIND, partial(be_ready_for, chosen=chosen))
    run = make_run(tmp_path, STEPS, saves_every_steps=STEPS)
    run = with_audits(run, rate, FOLLOW_STEPS) if rate else run

    async def scene(swarm: Swarm) -> None:
        ids = {name: swarm.identity_of(name).peer_id for name in liars}
        lying = Lying(ids, together=len(liars) > 1)
        lying.kinds = dict.fromkeys(liars, KIND)
        with put_in(lying):
            peers = await begun(swarm, run, names)
            honest = [peer for peer in peers if peer.name not in liars]
            await swarm.until(lambda: honest[0].step() >= 3, "steps", 60)
            newcomer = swarm.peer("z", initial_peers=(swarm.address(honest[0]),))
            swarm.start(newcomer)
            await swarm.until(lambda: lying.count > 0, "a view is to be taken over", 30)
            count = len(honest) + 1
            both = (*honest, newcomer)
            await swarm.until(are_in_views_of(both, count), "a view without liars", within_s)
            step = honest[0].step()
            await swarm.until(lambda: honest[0].step() >= step + 5, "steps", 10)
            wanted = {peer.peer_id for peer in honest}
            for peer in honest:
                views = [it["members"] for it in peer.events() if it["event"] == "view"]
                assert all(wanted <= set(members) for members in views), "no honest one was out"
            if rate:
                barred = {bar.peer_id for bar in agreement_of(honest[0]).bars if bar.count}
                assert barred == set(ids.values())

    play(1, tmp_path / "world", scene)
