"""Real daemons in virtual time: a liar's work before it was found is taken back, and stays so."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.transcript.checking import Checker
from p2p_dtfm.daemon.proof import of_others
from p2p_dtfm.daemon.proof.transcript_file import FILE_NAME, TranscriptLines
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.lies.putting import put_in
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds import judge
from p2p_dtfm.testbed.virtual.seeds.playing import Play
from p2p_dtfm.testbed.virtual.seeds.run import make_run, reference_of, with_audits
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.model.checkpoint import list_checkpoints
from tests.testbed.test_boards_of_late_joiners import ever_tokens, kept

STEPS = 50
UNDO_STEPS = 16
EVERY = 8
"""Steps between the states that are kept, as in `AuditSpec.undo_every`."""
SAVED_EVERY = 4
RATE = 0.1
SEED = 5
"""A seed in which the liar is found late."""
FIRST_S = 6.0
LIAR = "d"
LIARS = {"h": 4.66, "g": 5.76}
"""Two liars that lie each by itself, and the second from which each of them lies."""


class World(NamedTuple):
    run: Path
    reference: judge.Reference


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("run")
    run = make_run(folder, STEPS, saves_every_steps=SAVED_EVERY)
    return World(with_audits(run, RATE, 5, UNDO_STEPS), reference_of(run, folder / "reference"))


SCHEDULE = Schedule(
    tuple("abcd"),
    (),
    (Fault(FIRST_S, math.inf, "lie", (LIAR,), 0.0, "flip"),),
    is_audited=True,
    liars=(LIAR,),
    audit_rate=RATE,
)
Meddle = Callable[[Swarm, Lying], Awaitable[None]]
"""Further events of a scene."""


def went_back(peer: Peer) -> list[tuple[int, int]]:
    return [(it["from_step"], it["step"]) for it in peer.events() if it["event"] == "went back"]


def final_losses(peer: Peer) -> dict[int, float]:
    return {it["step"]: it["loss"] for it in peer.events() if it["event"] == "step" and it["loss"]}


def require_no_trace(peers: Sequence[Peer], world: World, through: Sequence[Peer]) -> None:
    """What stays is the result of an honest process alone. `through`: the peers that were there
    throughout."""
    judge.require_states(peers, world.reference)
    for peer in through:
        off = [abs(loss - world.reference.losses[n]) for n, loss in final_losses(peer).items()]
        assert len(off) == STEPS and max(off) <= 1e-4
    for peer in peers:
        (root,) = peer.home.glob("runs/*/checkpoints")
        epochs = {it.manifest.lineage[:2] for it in list_checkpoints(root) if it.manifest.step > 24}
        assert epochs == {"1:"}, "no state of before is on a disk"


def played(
    world: World,
    folder: Path,
    seed: int,
    meddle: Meddle | None = None,
    schedule: Schedule = SCHEDULE,
) -> tuple[Lying, list[Peer]]:
    async def scene(swarm: Swarm) -> tuple[Lying, list[Peer]]:
        one = Play(swarm, world.run, schedule)
        with put_in(one.lying, schedule.lies):
            meddling = asyncio.create_task(meddle(swarm, one.lying)) if meddle else None
            await one.play()
            if meddling is not None:
                await meddling
                await swarm.until(lambda: all(map(is_done, one.honest())), "they end again", 120)
            await asyncio.sleep(10)
        return one.lying, one.honest()

    return play(seed, folder, scene)


def is_done(peer: Peer) -> bool:
    return peer.told_step() == STEPS


def saved(peer: Peer) -> list[tuple[int, str]]:
    """Whole models on the peer's disk."""
    roots = peer.home.glob("runs/*/checkpoints")
    found = (it for root in roots for it in list_checkpoints(root) if len(it.layers) == 6)
    return [(it.manifest.step, it.manifest.lineage) for it in found]


def test_a_liars_steps_are_taken_back_and_the_losses_are_the_honest_runs(
    world: World, tmp_path: Path
) -> None:
    lying, honest = played(world, tmp_path, seed=1)
    first = min(deed.step for deed in lying.told)
    committed = [deed.step for deed in lying.committed if lying.told.get(deed)]
    assert committed, "or there was nothing to take back"
    ((from_step, step),) = {back for peer in honest for back in went_back(peer)}
    assert step <= first and from_step - UNDO_STEPS - EVERY < step <= from_step - UNDO_STEPS
    assert step > 0 and step % EVERY == 0, "a state that was kept, and not the beginning"
    for peer in honest:
        assert len(went_back(peer)) == 1, "it is said once"
    require_no_trace(honest, world, honest)
    wrong = [it for it in honest[0].events() if it["event"] == "step" and it["step"] == first]
    assert len(wrong) == 2, "that step was done again"
    _check_transcript(honest[0], from_step - step)


def _check_transcript(peer: Peer, undone: int) -> None:
    """A reader of the transcript follows it from the steps that were taken back to those that
    stayed."""
    (path,) = peer.home.glob(f"runs/*/{FILE_NAME}")
    checker, lines = Checker(verify), TranscriptLines(path)
    for entry in lines.entries():
        checker.take(entry)
    assert checker.repeated == undone and not checker.gaps
    assert sorted(checker.steps) == list(range(STEPS + 1)) and not lines.damaged


async def dies_among_lies(swarm: Swarm, lying: Lying) -> None:
    """A peer whose disk has the whole model with a liar's work in it. It is back once all went
    back."""
    await swarm.until(lambda: bool(lying.stayed()), "a lie is committed", 60)
    away, here = swarm.named("c"), swarm.named("a")

    def has_poison() -> bool:
        stayed = lying.stayed()
        return bool(stayed) and max(saved(away), default=(0, ""))[0] > stayed[0]

    await swarm.until(has_poison, "c has saved what a liar made", 60)
    swarm.kill(away)
    await swarm.until(lambda: bool(went_back(here)), "they go back", 60)
    newest = max(saved(away))
    assert newest[0] > went_back(here)[0][1] and newest[1][1] != ":", "it has what was taken back"


@pytest.mark.nightly
def test_after_a_power_cut_of_all_what_was_taken_back_counts_for_nothing(
    world: World, tmp_path: Path
) -> None:
    """All start again from their disks. One disk has more steps than the others', and a whole
    model."""

    async def meddle(swarm: Swarm, lying: Lying) -> None:
        await dies_among_lies(swarm, lying)
        a, b, c = (swarm.named(name) for name in "abc")
        await asyncio.sleep(0.5)
        swarm.cut_power(a)
        swarm.cut_power(b)
        assert max(saved(c)) > max(saved(a)), "or nothing is asked of the epoch"
        await asyncio.sleep(1.0)
        for peer in (c, a, b):
            swarm.start(peer)

    _, honest = played(world, tmp_path, SEED, meddle)
    require_no_trace(honest, world, [])


@pytest.mark.nightly
def test_who_comes_back_to_what_was_done_again_counts_it_for_those_who_did(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer was killed, the others went back behind what it had counted, and it was back before
    they had come as far again. It lacked no step, and counted the old ones for good."""

    async def meddle(swarm: Swarm, lying: Lying) -> None:
        await dies_among_lies(swarm, lying)
        monkeypatch.setattr(of_others, "BEGIN_AFTER_S", 0.2)  # the run is short
        monkeypatch.setattr(of_others, "PIECE_EVERY_S", 0.01)
        swarm.start(swarm.named("c"))

    _, honest = played(world, tmp_path, SEED, meddle)
    boards = [kept(peer).tallies.board() for peer in honest]
    assert boards == boards[:1] * 3
    for peer in honest:
        given = kept(peer)
        own = given.tallies.of(peer.peer_id) + given.undone
        assert ever_tokens(given) * 6 == pytest.approx(own), "it stayed or was done again"


@pytest.mark.nightly
def test_who_was_away_and_all_that_fail_at_once_bring_nothing_back(
    world: World, tmp_path: Path
) -> None:
    """The peer is let in at once, and then the others lose a member whose layers all have. The
    states that members bring count then, and it would bring more steps."""

    async def meddle(swarm: Swarm, lying: Lying) -> None:
        await dies_among_lies(swarm, lying)
        b, c = swarm.named("b"), swarm.named("c")
        swarm.start(c)
        await swarm.until(lambda: c.daemon is not None and c.told_step() > 0, "c is in", 60)
        swarm.kill(b)
        await asyncio.sleep(2.0)
        swarm.start(b)

    _, honest = played(world, tmp_path, SEED, meddle)
    require_no_trace(honest, world, [honest[0]])


@pytest.mark.nightly
def test_two_that_are_found_one_after_the_other_are_both_undone(tmp_path: Path) -> None:
    """Eight equal replicas, so that six of them are more than half."""
    run = make_run(tmp_path, STEPS)
    plain = RunSpec.model_validate_json(run.read_text())
    batch = plain.batch.model_copy(update={"microbatch": 1})
    run.write_text(plain.model_copy(update={"batch": batch}).model_dump_json())
    reference = reference_of(run, tmp_path / "reference")
    world = World(with_audits(run, 0.3, 5, 20), reference)
    lies = [Fault(at_s, math.inf, "lie", (name,), 0.0, "flip") for name, at_s in LIARS.items()]
    schedule = Schedule(
        tuple("abcdefgh"),
        (),
        tuple(lies),
        is_audited=True,
        liars=tuple(sorted(LIARS)),
        audit_rate=0.3,
    )
    _, honest = played(world, tmp_path / "swarm", 0, schedule=schedule)
    judge.require_states(honest, reference)
    for peer in honest:
        assert len(went_back(peer)) == 2
        off = [abs(loss - reference.losses[n]) for n, loss in final_losses(peer).items()]
        assert len(off) == STEPS and max(off) <= 1e-4
