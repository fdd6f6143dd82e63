"""A peer says that it is faster than it is: the plan goes by what the others have seen, and gives
the work back. A peer that calls others slow moves nothing, and a load that passes is forgotten.

Real daemons in virtual time, in which each stage takes the time of its machine, whatever it says.
"""

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from p2p_dtfm.core.audit.believed_speeds import seen_slower
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.lies.putting import put_in
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import agreement_of, begun

NAMES = "abcd"
LIAR = "d"
MICROBATCHES = 16
WITHIN_STEPS = 60
"""Fifteen seconds of a view, ten steps to see the speed, and a few to agree, with such short
steps."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_run(tmp_path_factory.mktemp("run"), 1000, saves_every_steps=1000)
    spec = json.loads(path.read_text())
    spec["batch"]["global_batch"] = 2 * MICROBATCHES
    spec["evaluation"]["every_steps"] = 1000
    path.write_text(json.dumps(spec))
    return path


async def begin(swarm: Swarm, run: Path) -> list[Peer]:
    peers = await begun(swarm, run, NAMES)
    await swarm.until(lambda: peers[0].step() >= 2, "steps", 120)
    return peers


def view_of(peer: Peer) -> View:
    view = agreement_of(peer).view
    assert view is not None and isinstance(view.plan, Plan)
    return view


def share_of(peers: list[Peer], name: str) -> int:
    """The number of a step's microbatches that the peer has."""
    plan = view_of(peers[0]).plan
    assert isinstance(plan, Plan)
    whom = next(peer.peer_id for peer in peers if peer.name == name)
    place = plan.place_of(whom)
    return 0 if place is None else plan.pipelines[place[0]].microbatch_count


def step_s(peer: Peer, last: int = 10) -> float:
    """The median length of the last steps."""
    times = [it["at_s"] for it in peer.events() if it["event"] == "step"][-last - 1 :]
    return float(median(after - before for before, after in pairwise(times)))


def lying(swarm: Swarm, kind: str, *names: str) -> Lying:
    made = Lying({it: swarm.identity_of(it).peer_id for it in names}, together=True)
    made.kinds = dict.fromkeys(names, kind)
    return made


@pytest.mark.nightly
def test_work_is_taken_back_from_who_says_that_it_is_fast(run: Path, tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        with put_in(lying(swarm, "speed", LIAR)):
            peers = await begin(swarm, run)
            first = peers[0]
            assert share_of(peers, LIAR) > MICROBATCHES // 2, "it is believed at first"
            slow_s = step_s(first, 2)
            await swarm.until(
                lambda: share_of(peers, LIAR) <= MICROBATCHES // 4, "work is taken back", 200
            )
            assert first.step() <= WITHIN_STEPS
            until = first.step() + 20
            await swarm.until(lambda: first.step() >= until, "more steps", 100)
            assert step_s(first) < slow_s / 2
            honest_s, until = step_s(first), first.step() + 400
            await swarm.until(lambda: first.step() >= until, "many more steps", 800)
            assert share_of(peers, LIAR) <= MICROBATCHES // 4
            assert step_s(first) < 1.2 * honest_s
            assert seen_slower(view_of(first).snapshot).keys() == {peers[-1].peer_id}

    play(1, tmp_path, scene)


@pytest.mark.nightly
@pytest.mark.parametrize(("names", "liars"), [("abcdef", "f"), ("abcdefgh", "gh")])
def test_a_stage_that_says_it_is_fast_holds_up_a_pipeline_for_a_while_only(
    run: Path, tmp_path: Path, names: str, liars: str
) -> None:
    """Nobody has room for the whole model, and no peer alone sees which stage is slow."""

    async def scene(swarm: Swarm) -> None:
        swarm.memory_gib = 0.9 / 1024
        with put_in(lying(swarm, "speed", *liars)):
            peers = await begun(swarm, run, names)
            first = peers[0]
            await swarm.until(lambda: first.step() >= 0, "a step", 120)
            await swarm.until(lambda: len(view_of(first).members) == len(names), "all are in", 60)
            began = first.step()
            await swarm.until(lambda: first.step() >= began + 10, "steps", 200)
            slow_s = step_s(first, 5)
            await swarm.until(lambda: first.step() >= began + WITHIN_STEPS, "more steps", 200)
            honest_s = step_s(first)
            assert honest_s < 0.75 * slow_s, "it was believed at first"
            until = first.step() + 100
            await swarm.until(lambda: first.step() >= until, "many more steps", 600)
            assert step_s(first, 100) < 1.1 * honest_s

    play(1, tmp_path, scene)


@pytest.mark.nightly
def test_who_calls_the_others_slow_moves_no_work(run: Path, tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        with put_in(lying(swarm, "slander", LIAR)):
            peers = await begin(swarm, run)
            shares = {name: share_of(peers, name) for name in NAMES}
            view = view_of(peers[0])
            until = peers[0].step() + 150
            await swarm.until(lambda: peers[0].step() >= until, "more steps", 300)
            assert peers[-1].daemon is not None
            own = view_of(peers[-1]).snapshot.record(peers[-1].peer_id)
            assert {name: share_of(peers, name) for name in NAMES} == shares, (view.id, own.paces)
            assert seen_slower(view_of(peers[0]).snapshot) == {}

    play(1, tmp_path, scene)


@pytest.mark.nightly
def test_a_load_that_passes_costs_its_peer_its_work_for_as_long(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's own word says that it is slow, too: this word is taken back as well."""
    slow = set[str]()
    block_ns = Process.block_ns

    def loaded(self: Process, duration_ns: int) -> None:
        block_ns(self, 8 * duration_ns if self.peer_name in slow else duration_ns)

    monkeypatch.setattr(Process, "block_ns", loaded)

    async def scene(swarm: Swarm) -> None:
        peers = await begin(swarm, run)
        fair = share_of(peers, LIAR)
        assert fair == MICROBATCHES // 4
        await swarm.until(lambda: peers[0].step() >= 80, "settled steps", 200)
        slow.add(LIAR)
        await swarm.until(lambda: share_of(peers, LIAR) < fair, "it gets less", 200)
        slow.clear()
        passed_s = swarm.now_s
        await swarm.until(lambda: share_of(peers, LIAR) == fair, "it has its share again", 400)
        assert swarm.now_s - passed_s < 150

    play(1, tmp_path, scene)
