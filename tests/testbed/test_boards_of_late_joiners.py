"""A peer that joins late learns from the others' transcripts, which prove it, who computed the
steps before it came."""

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from p2p_dtfm.core.commit.shares import Tallies
from p2p_dtfm.core.messages.prepared import open_prepared, sign_prepared
from p2p_dtfm.core.messages.statements import signers
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.lineage import GENESIS_LINEAGE, extend
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import signing_in, verifying_in
from p2p_dtfm.core.transcript.checking import Checker, NotTrue
from p2p_dtfm.core.transcript.earlier import EarlierSteps, leading_to
from p2p_dtfm.core.transcript.entries import (
    FORMAT,
    Began,
    Committed,
    TookOver,
    entry_of,
    line_of,
)
from p2p_dtfm.daemon.proof import of_others
from p2p_dtfm.daemon.proof.transcript_file import FILE_NAME
from p2p_dtfm.daemon.telemetry.contribution import FILE, KeptTallies
from p2p_dtfm.net.contacts.identity import Identity, verify
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.model.gpt import layer_count

STEPS = 40


class History(NamedTuple):
    """What a founder leaves behind after another peer has joined it."""

    transcript: bytes
    spec: RunSpec
    tallies: Tallies
    joiners: Tallies
    keys: dict[str, Identity]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), STEPS)


@pytest.fixture(scope="module", autouse=True)
def soon() -> Iterator[None]:
    """Peers ask others soon, as a run of seconds is over before they would in their own time."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(of_others, "BEGIN_AFTER_S", 0.5)
        patches.setattr(of_others, "PIECE_EVERY_S", 0.01)
        yield


@pytest.fixture(scope="module")
def history(run: Path, tmp_path_factory: pytest.TempPathFactory) -> History:
    found: list[History] = []

    async def scene(swarm: Swarm) -> None:
        first, late = await both_end(swarm, run)
        keys = {peer.peer_id: swarm.identity_of(peer.name) for peer in swarm.peers}
        transcript = transcript_of(first).read_bytes()
        began = entry_of(transcript.splitlines()[0])
        assert isinstance(began, Began)
        spec = RunSpec.from_canonical_bytes(began.run_spec)
        tallies = kept(first).tallies, kept(late).tallies
        found.append(History(transcript, spec, *tallies, keys))

    play(1, tmp_path_factory.mktemp("history") / "world", scene)
    return found[0]


def kept(peer: Peer) -> KeptTallies:
    (path,) = peer.home.glob(f"runs/*/{FILE}")
    return msgspec.json.decode(path.read_bytes(), type=KeptTallies)


def transcript_of(peer: Peer) -> Path:
    (path,) = peer.home.glob(f"runs/*/{FILE_NAME}")
    return path


async def both_end(
    swarm: Swarm,
    run: Path,
    before: Callable[[Peer], None] = lambda first: None,
    **founders: object,
) -> tuple[Peer, Peer]:
    """The founder is alone for ten steps, `before` another peer joins it."""
    first = swarm.peer("first", run=str(run), **founders)
    late = swarm.peer("late", initial_peers=(swarm.address(first),))
    swarm.start(first)
    await swarm.until(lambda: first.step() >= 10, "ten steps of one", 120)
    before(first)
    swarm.start(late)
    await swarm.until(lambda: not (first.is_running or late.is_running), "the end", 300)
    for peer in (first, late):
        assert peer.ended is not None and peer.ended.result() == 0, peer.standing()
    assert min(late.losses()) >= 10, "it has seen none of these steps"
    return first, late


def test_a_joiners_board_is_the_founders(history: History) -> None:
    boards = history.tallies, history.joiners
    assert boards[0].step_count == boards[1].step_count == STEPS
    assert boards[0].board() == boards[1].board()
    assert set(boards[1].board()) == set(history.keys) and len(history.keys) == 2


def test_who_keeps_no_transcript_gives_none(run: Path, tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        first, late = await both_end(swarm, run, transcript_mib=0)
        assert kept(first).tallies.step_count == STEPS
        assert kept(late).tallies.step_count == len(late.losses()) < STEPS

    play(1, tmp_path / "world", scene)


def _with_another_signature(first: Peer) -> None:
    path = transcript_of(first)
    lines = path.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if isinstance(entry_of(line.encode()), Committed))
    entry = entry_of(lines[at].encode())
    assert isinstance(entry, Committed)
    wrong = msgspec.structs.replace(entry.signed[0], signature=bytes(64))
    lines[at] = line_of(Committed((wrong, *entry.signed[1:])))
    path.write_text("".join(line + "\n" for line in lines))


def test_a_lying_transcript_changes_nothing_and_is_told(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(swarm: Swarm) -> None:
        _, late = await both_end(swarm, run, _with_another_signature)
        assert kept(late).tallies.step_count == len(late.losses()) < STEPS

    with caplog.at_level(logging.WARNING, "p2p_dtfm"):
        play(1, tmp_path / "world", scene)
    told = [it.getMessage() for it in caplog.records if "is not true" in it.getMessage()]
    assert len(told) == 1 and "changes nothing" in told[0]


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (4, 5))]
)
def test_useful_tokens_of_all_homes_add_up_to_the_run_after_kills(
    seed: int, run: Path, tmp_path: Path
) -> None:
    async def scene(swarm: Swarm) -> None:
        draws, first = random.Random(seed), swarm.peer("first", run=str(run), expect_peers=3)
        others = [swarm.peer(it, initial_peers=(swarm.address(first),)) for it in ("b", "c")]
        swarm.start(first)
        await swarm.until(lambda: first.has_run, "the run is founded", 60)
        for peer in others:
            swarm.start(peer)
        await swarm.until(lambda: first.step() >= 5, "some steps of three", 120)
        for victim in draws.sample(swarm.peers, 2):
            await killed_and_back(swarm, victim, draws.randrange(2, 6))
        await swarm.until(lambda: not any(p.is_running for p in swarm.peers), "the end", 300)
        spec, found = read_run_spec(str(run)), [kept(peer) for peer in swarm.peers]
        own = [
            (it, it.tallies.of(peer.peer_id)) for it, peer in zip(found, swarm.peers, strict=True)
        ]
        assert sum(useful for _, useful in own) == STEPS * spec.tokens_per_step * layer_count(spec)
        assert found[0].tallies.board() == found[1].tallies.board() == found[2].tallies.board()
        for given, useful in own:
            ever = ever_tokens(given) * layer_count(spec)
            assert ever == pytest.approx(useful + given.undone), "it stayed or was done again"

    play(seed, tmp_path / "world", scene)


async def killed_and_back(swarm: Swarm, victim: Peer, away_steps: int) -> None:
    """The others go on for so many steps. Afterwards the victim sees some steps again."""
    left = [peer for peer in swarm.peers if peer is not victim]
    swarm.kill(victim)
    at = left[0].step() + away_steps
    await swarm.until(lambda: left[0].step() >= at, "two go on", 120)
    swarm.start(victim, initial_peers=(swarm.address(left[0]),))
    await swarm.until(lambda: victim.step() >= at + 3, "it is back", 120)


def ever_tokens(given: KeptTallies) -> float:
    return given.older.tokens + sum(day.tokens for day in given.days.values())


# of its lines alone -----------------------------------------------------------------------------


def read(history: History, lines: bytes, piece_bytes: int = 1 << 20) -> EarlierSteps:
    reader = EarlierSteps(verify, history.spec)
    for at in range(0, len(lines), piece_bytes):
        reader.take(lines[at : at + piece_bytes])
    return reader


def last_lineage(reader: EarlierSteps) -> dict[int, str]:
    """Each layer's lineage after the last step that trains."""
    (lineage,) = (lineage for lineage, led in reader.led.items() if led.step == STEPS - 1)
    return {STEPS: lineage}


@pytest.mark.parametrize("piece_bytes", [1 << 20, 1000])
def test_all_steps_lead_to_the_states_at_the_end(history: History, piece_bytes: int) -> None:
    reader = read(history, history.transcript, piece_bytes)
    found = leading_to(reader.led, last_lineage(reader))
    settled = Tallies()
    settled.settle(found)
    assert sorted(found) == list(range(STEPS)) and reader.first_step == 0
    assert settled.board() == history.tallies.board()


def test_a_torn_line_costs_what_cannot_be_followed_through_it(history: History) -> None:
    lines = history.transcript.splitlines(keepends=True)
    committed = [n for n, line in enumerate(lines) if isinstance(entry_of(line), Committed)]
    lines[committed[5]] = lines[committed[5]][:40] + b"\n"
    reader = read(history, b"".join(lines))
    assert sorted(leading_to(reader.led, last_lineage(reader))) == list(range(6, STEPS))


def test_what_all_have_signed_anew_leads_to_no_state_that_was(history: History) -> None:
    """A forger of a history may have all its keys."""
    made_up, checker = [], Checker(verify)
    run = history.spec.digest()
    is_signed = verifying_in(run, verify)
    lineage = GENESIS_LINEAGE
    for line in history.transcript.splitlines():
        entry = entry_of(line)
        if isinstance(entry, Committed):
            said = [open_prepared(signed, is_signed) for signed in entry.signed]
            step = said[0].step
            losses = {it.peer_id: 2 * it.loss_sum if step == 0 else it.loss_sum for it in said}
            other = [
                msgspec.structs.replace(it, base=lineage, loss_sum=losses[it.peer_id])
                for it in said
            ]
            signers = {it: signing_in(run, key.sign) for it, key in history.keys.items()}
            entry = Committed(tuple(sign_prepared(it, signers[it.peer_id]) for it in other))
            checker.take(entry)
            taken = checker.steps[step]
            lineage = extend(lineage, step, taken.view.id, taken.outcome.digest)
        else:
            checker.take(entry)
        made_up.append(line_of(entry).encode())
    reader = read(history, b"\n".join([*made_up, b""]))
    true = read(history, history.transcript)
    assert len(reader.led) == len(true.led), "all of it is signed, and one follows the other"
    assert leading_to(reader.led, last_lineage(true)) == {}


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"microbatch_count": 10**15}, "every microbatch needs a pipeline"),
        ({"microbatch_count": 0}, "a pipeline without work"),
        ({"end_layer": 10**15}, "a pipeline must hold every layer"),
        ({"first_layer": -(10**15)}, "layers must be contiguous"),
    ],
)
def test_a_plan_that_is_none_of_the_run_is_refused_before_anything_walks_it(
    history: History, changes: dict[str, int], flaw: str
) -> None:
    """The writer of a transcript may have all its keys, and sign any plan."""
    checker = Checker(verify)
    began, taken, *_ = map(entry_of, history.transcript.splitlines())
    assert isinstance(taken, TookOver) and isinstance(taken.plan, Plan)
    (pipeline, *_), (stage, *_) = taken.plan.pipelines, taken.plan.pipelines[0].stages
    of_stage = {name: it for name, it in changes.items() if name.endswith("layer")}
    stages = (msgspec.structs.replace(stage, **of_stage),)
    of_pipeline = {name: it for name, it in changes.items() if name not in of_stage}
    changed = msgspec.structs.replace(pipeline, stages=stages, **of_pipeline)
    plan = msgspec.structs.replace(taken.plan, pipelines=(changed,))
    checker.take(began)
    with pytest.raises(NotTrue, match=flaw):
        checker.take(msgspec.structs.replace(taken, plan=plan))


def test_another_run_is_refused(history: History) -> None:
    other = history.spec.model_copy(update={"name": "another"})
    began = line_of(Began(FORMAT, other.canonical_bytes())).encode()
    with pytest.raises(NotTrue, match="another run"):
        read(history, began + b"\n")


def test_what_daemons_sign_in_one_run_holds_in_no_other(history: History) -> None:
    """A home's key is the same in all its runs."""
    _, taken, *rest = map(entry_of, history.transcript.splitlines())
    assert isinstance(taken, TookOver)
    said = next(it for it in rest if isinstance(it, Committed))
    agreed = set(taken.snapshot.contributors)
    here = verifying_in(history.spec.digest(), verify)
    assert signers(taken.certificate, here) == agreed
    assert open_prepared(said.signed[0], here).view == taken.snapshot.view_id
    for elsewhere in (verify, verifying_in("f" * 64, verify)):
        assert not signers(taken.certificate, elsewhere)
        with pytest.raises(PeerFault, match="forged signature"):
            open_prepared(said.signed[0], elsewhere)
