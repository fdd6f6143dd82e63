"""A run with audits leaves a transcript by which somebody who was not there can check what was
done. In it one of two pipelines of two is killed, and the others go on."""

import json
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from p2p_dtfm.core.messages.audit_messages import Share
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.transcript.entries import Committed, Entry, TookOver
from p2p_dtfm.daemon.proof.sample_again import drawn
from p2p_dtfm.daemon.proof.transcript_file import FILE_NAME
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.testbed.virtual.seeds.run import make_run, reference_of, with_audits
from p2p_dtfm.testbed.virtual.seeds.watching.words import Blames
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.model.checkpoint import layer_path
from p2p_dtfm.train.stage.replay.arithmetic import max_threads
from tests.e2e.forger import entries_in, forged, keys_of, other_gradients, write_entries
from tests.e2e.helpers import logged, run_program, wait_until
from tests.e2e.test_audits_of_stages import STEPS, swarm, until
from tests.testbed.begun import begun
from tests.testbed.pairs import planned_in_pairs

LAYERS = 6
DRAWS = 2_000


class Run(NamedTuple):
    home: Path
    """The home of the founder, which was there from the first step to the last."""
    entries: list[Entry]
    keys: dict[str, Identity]

    @property
    def data(self) -> Path:
        return next(self.home.glob(f"runs/*/{FILE_NAME}")).parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, prepared_data: Path) -> Run:
    directory = tmp_path_factory.mktemp("verified")
    with swarm(directory, prepared_data, "", 4, STEPS) as local:
        first, *_, last = local.children
        until([first], 5)
        last.process.kill()
        wait_until(lambda: (first.status() or {}).get("state") == "done", "the end")
        for child in local.children[:-1]:
            assert not logged(child, "something else than was claimed"), "nobody lied"
        homes = [child.home for child in local.children]
    path = next(first.home.glob(f"runs/*/{FILE_NAME}"))
    return Run(first.home, entries_in(path), keys_of(homes))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run in virtual time, with the same daemons and no processes of them."""
    folder, blames = tmp_path_factory.mktemp("played"), Blames()

    async def scene(swarm: Swarm) -> list[Path]:
        peers = await begun(swarm, with_audits(make_run(folder, STEPS), 1.0), "acbd")
        await swarm.until(lambda: peers[0].step() >= 5, "steps of two pipelines", 60)
        swarm.kill(peers[-1])
        left = peers[:-1]
        await swarm.until(lambda: not any(it.is_running for it in left), "the end of the run", 120)
        return [peer.home for peer in peers]

    with blames.heard(), pytest.MonkeyPatch.context() as patches:
        planned_in_pairs(patches, 1, "ac", "bd")
        homes = play(1, folder / "world", scene)
    blames.require_none()
    path = next(homes[0].glob(f"runs/*/{FILE_NAME}"))
    return Run(homes[0], entries_in(path), keys_of(homes))


def verified(place: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = run_program("verify", place, "--json", *options)
    assert done.returncode in (0, 1, 3), done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["holds"] is {0: True, 1: False, 3: None}[done.returncode]
    return done.returncode, told


@pytest.mark.parametrize("of", ["played", pytest.param("run", marks=pytest.mark.nightly)])
def test_an_honest_run_holds_though_a_member_was_killed(
    of: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(of)
    code, told = verified(run.home, "--sample", "10%", "--seed", "3")
    assert code == 0 and told["holds"], told
    assert told["judged"] >= len(told["drawn"]) > 3 and not told["unjudged"]
    assert told["steps"] + sum(end - first for first, end in told["missing"]) == STEPS
    spent = sum(each["token_layers"] for each in told["tallies"].values())
    assert spent == LAYERS * told["tokens"], "what all did is what the run is of"
    done = run_program("verify", run.home, "--sample", "10%")
    assert done.returncode == 0 and "bit for bit" in done.stdout, done.stdout


@pytest.mark.nightly
def test_a_history_that_all_have_sworn_to_is_refused_by_who_computes_it(
    run: Run, tmp_path: Path
) -> None:
    """A hundredth of the works would be enough for a long run. This one has few, so more of them
    are drawn."""
    works = [
        (number, peer) for number in range(3, STEPS) for peer in sorted(run.keys) if number % 3 == 0
    ]
    path = write_entries(tmp_path / FILE_NAME, forged(run.entries, run.keys, works))
    data = ("--data", str(run.data))
    code, told = verified(path, "--sample", "0", "--allow-gaps", *data)
    assert code == 0, ("all of it is signed", told)
    code, told = verified(path, "--sample", "30%", "--seed", "1", *data)
    assert code == 1 and (told["step"], told["signed_by"]) in works, told
    assert "another work than it had to do" in told["refused"]


def begun_otherwise(share: Share) -> Share:
    others = {layer: digest[::-1] for layer, digest in share.parameters.items()}
    return msgspec.structs.replace(share, parameters=others)


@pytest.mark.nightly
def test_who_began_with_another_state_is_refused_though_all_its_holders_say_so(
    run: Run, tmp_path: Path
) -> None:
    """The forged step is of the time when there were two pipelines of two."""
    works = [(3, peer) for peer in run.keys]
    path = write_entries(
        tmp_path / FILE_NAME, forged(run.entries, run.keys, works, begun_otherwise)
    )
    data = ("--data", str(run.data))
    assert verified(path, "--sample", "0", "--allow-gaps", *data)[0] == 0
    code, told = verified(path, "--sample", "100%", *data)
    assert code == 1 and "began with another layer" in told["refused"], told


def evaluated_better(prepared: Prepared) -> Prepared:
    return msgspec.structs.replace(prepared, held_out_loss_sum=prepared.held_out_loss_sum / 2)


@pytest.mark.nightly
def test_held_out_losses_are_computed_again_where_a_stage_is_the_whole_model(
    tmp_path: Path,
) -> None:
    """The last step is forged, or the next one would name another lineage."""
    home = reference_of(with_audits(make_run(tmp_path, steps=11)), tmp_path / "alone").home
    path = next(home.glob(f"runs/*/{FILE_NAME}"))
    data, entries = ("--data", str(path.parent)), entries_in(path)[:-1]
    assert verified(write_entries(tmp_path / FILE_NAME, entries), "--sample", "100%", *data)[0] == 0
    keys = keys_of([home])
    works = [(10, peer) for peer in keys]
    entries = forged(entries, keys, works, lambda share: share, evaluated_better)
    path = write_entries(tmp_path / FILE_NAME, entries)
    code, told = verified(path, "--sample", "100%", *data)
    assert code == 1 and "another work than it had to do" in told["refused"], told
    assert verified(path, "--sample", "0", *data)[0] == 0


@pytest.mark.nightly
def test_held_out_losses_of_pipelines_are_computed_again_also_after_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three pipelines of two, nothing goes through the third to be evaluated."""
    steps, names = 11, "acebdf"
    planned_in_pairs(monkeypatch, 1, names[:3], names[3:])

    async def scene(swarm: Swarm) -> list[Path]:
        peers = await begun(swarm, with_audits(make_run(tmp_path, steps), 0.1), names)
        ended = lambda: all(not peer.is_running for peer in peers)  # noqa: E731
        await swarm.until(ended, "they end with the run", 120)
        return [peer.home for peer in peers]

    homes = play(1, tmp_path / "world", scene)
    path = next(homes[0].glob(f"runs/*/{FILE_NAME}"))
    data, entries, keys = ("--data", str(path.parent)), entries_in(path), keys_of(homes)
    code, told = verified(write_entries(tmp_path / FILE_NAME, entries), "--sample", "100%", *data)
    assert code == 0 and told["stage_steps"] == (steps + 1) * len(names) == told["judged"], told
    heads = [
        peer
        for peer, key in keys.items()
        if any(key.to_bytes() == (home / "identity.key").read_bytes() for home in homes[3:])
    ]
    for last in (steps, steps - 1):  # a later step would name another lineage
        kept = entries[: len(entries) - (steps - last)]
        false = forged(kept, keys, [(last, it) for it in heads], lambda it: it, evaluated_better)
        path = write_entries(tmp_path / FILE_NAME, false)
        code, told = verified(path, "--sample", "100%", *data)
        assert code == 1 and told["step"] == last and told["signed_by"] in heads, told
        assert verified(path, "--sample", "0", *data)[0] == 0


def by_another_machine(share: Share) -> Share:
    return msgspec.structs.replace(other_gradients(share), arithmetic="cpu-of-nobody")


def by_many_threads(share: Share) -> Share:
    return msgspec.structs.replace(other_gradients(share), threads=1 + max_threads())


@pytest.mark.nightly
def test_what_nobody_here_can_judge_is_not_said_to_hold(run: Run, tmp_path: Path) -> None:
    """A forger names its own arithmetic and its own threads, too."""
    works = [(number, peer) for number in range(6, STEPS) for peer in run.keys]
    for change, expected in ((by_another_machine, 3), (by_many_threads, 1)):
        entries = forged(run.entries, run.keys, works, change)
        path = write_entries(tmp_path / FILE_NAME, entries)
        code, told = verified(path, "--sample", "10%", "--seed", "1", "--data", str(run.data))
        assert code == expected, told
        if code == 3:
            assert sum(told["unjudged"].values()) > 0
        else:
            assert "threads: nobody of its arithmetic does" in told["refused"], told


def is_whole(checkpoint: Path) -> bool:
    return all(layer_path(checkpoint, layer).is_file() for layer in range(LAYERS))


@pytest.mark.nightly
def test_a_checkpoint_that_nobody_has_signed_is_passed_over(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.data, tmp_path / "run")
    directory = tmp_path / "run" / "checkpoints" / "step-00000010"
    shutil.rmtree(directory, ignore_errors=True)  # the founder may have come to the last step first
    homes = sorted(run.home.parent.glob(f"peer-*/runs/*/checkpoints/{directory.name}"))
    shutil.copytree(next(filter(is_whole, homes)), directory)
    path = layer_path(directory, 1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, told = verified(tmp_path / "run" / FILE_NAME, "--sample", "10%", "--seed", "1")
    assert code == 0 and len(told["passed_over"]) == 1 and not told["unjudged"], told
    assert max(told["drawn"])[0] > 10, "it comes there from the first step"


def test_of_five_hundred_forged_works_one_is_drawn() -> None:
    chance = random.Random(5)
    for count in (500, 2_000, 50_000):
        works = [(step, "somebody") for step in range(count)]
        lies = set(chance.sample(works, 500))
        draws = DRAWS if count < 50_000 else DRAWS // 10
        found = sum(bool(lies & set(drawn(works, 0.01, chance.randrange))) for _ in range(draws))
        assert found >= 0.985 * draws, (count, found, "0.99 and more, within what chance does")


def without_signature(entries: list[Entry]) -> list[Entry]:
    place = next(n for n, entry in enumerate(entries) if isinstance(entry, Committed))
    entry = entries[place]
    assert isinstance(entry, Committed)
    first = msgspec.structs.replace(entry.signed[0], signature=bytes(64))
    return [*entries[:place], Committed((first, *entry.signed[1:])), *entries[place + 1 :]]


def without_a_maker(entries: list[Entry]) -> list[Entry]:
    place = next(n for n, entry in enumerate(entries) if isinstance(entry, TookOver))
    entry = entries[place]
    assert isinstance(entry, TookOver)
    fewer = msgspec.structs.replace(entry.certificate, ready=entry.certificate.ready[1:])
    changed = msgspec.structs.replace(entry, certificate=fewer)
    return [*entries[:place], changed, *entries[place + 1 :]]


def in_another_order(entries: list[Entry]) -> list[Entry]:
    steps = [n for n, entry in enumerate(entries) if isinstance(entry, Committed)]
    one, other = steps[1], steps[2]
    changed = list(entries)
    changed[one], changed[other] = changed[other], changed[one]
    return changed


def by_fewer(entries: list[Entry]) -> list[Entry]:
    place = next(n for n, entry in enumerate(entries) if isinstance(entry, Committed))
    entry = entries[place]
    assert isinstance(entry, Committed)
    return [*entries[:place], Committed(entry.signed[1:]), *entries[place + 1 :]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_signature, "forged signature"),
        (without_a_maker, "lacks the signature of"),
        (in_another_order, "Prepared of"),
        (by_fewer, "no Prepared of"),
        (lambda entries: entries[1:], "does not begin with its run"),
        (lambda entries: [entries[0], *entries], "begins twice"),
    ],
    ids=["signature", "certificate", "order", "fewer", "no run", "two runs"],
)
def test_what_is_changed_afterwards_is_refused(
    played: Run, tmp_path: Path, change: Any, reason: str
) -> None:
    path = write_entries(tmp_path / FILE_NAME, change(played.entries))
    code, told = verified(path, "--sample", "0")
    assert code == 1 and reason in told["refused"], told


def test_a_torn_line_costs_that_line(played: Run, tmp_path: Path) -> None:
    path = write_entries(tmp_path / FILE_NAME, played.entries)
    path.write_bytes(path.read_bytes()[:-40])
    code, told = verified(path, "--sample", "0", "--allow-gaps")
    assert code == 0 and told["damaged_lines"] == 1
    assert told["steps"] == STEPS - 1 or told["missing"] == []


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("verify", "nowhere"), "no transcript"),
        (("verify", "pyproject.toml"), "no transcript"),
        (("verify", "pyproject.toml", "--sample", "many"), "--sample many is no share"),
    ],
)
def test_what_cannot_be_read_is_told(words: tuple[str, ...], cause: str) -> None:
    done = run_program(*words)
    assert done.returncode == 2 and cause in done.stderr, done.stderr
