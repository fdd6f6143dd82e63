"""A forger of a run leaves parts out of its transcript, or puts other files beside it, so that a
stranger's `verify` says that all holds."""

import contextlib
import io
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import typer

from p2p_dtfm.cli.commands.offline.verify import UNJUDGED
from p2p_dtfm.cli.commands.offline.verify import verify as verify_command
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.transcript.checking import Checker, NotTrue
from p2p_dtfm.core.transcript.entries import Began, Committed, Entry, TookOver, format_of, line_of
from p2p_dtfm.core.transcript.joining import joined
from p2p_dtfm.daemon.proof.from_disk import sample_of
from p2p_dtfm.daemon.proof.sample_again import Judged, WorkSample, works_of
from p2p_dtfm.daemon.proof.transcript_file import FILE_NAME
from p2p_dtfm.daemon.trainer import step_loop
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.testbed.virtual.seeds.run import (
    make_run,
    reference_of,
    with_audits,
    with_given_weights,
)
from p2p_dtfm.train.model.checkpoint import layer_path, load_layer, read_manifest
from tests.e2e.forger import entries_in, forged, keys_of, write_entries
from tests.train.saved_layers import save_layers

STEPS, SAVED = 24, 20
"""The last checkpoint is of the end, the one before it of step 20, and the one before that of step
10."""
LAYERS = 6


class Run(NamedTuple):
    home: Path
    entries: list[Entry]

    @property
    def directory(self) -> Path:
        return next(self.home.glob(f"runs/*/{FILE_NAME}")).parent


def run_of(home: Path) -> Run:
    return Run(home, entries_in(next(home.glob(f"runs/*/{FILE_NAME}"))))


def run_in(folder: Path) -> Path:
    """An audited run with all checkpoints kept."""
    run = with_audits(make_run(folder, STEPS))
    spec = RunSpec.model_validate_json(run.read_text())
    checkpoint = spec.checkpoint.model_copy(update={"keep": 3})
    run.write_text(spec.model_copy(update={"checkpoint": checkpoint}).model_dump_json())
    return run


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("honest")
    return run_of(reference_of(run_in(folder), folder / "alone").home)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run trained rightly, but for one checkpoint's content: another model from there on."""
    folder = tmp_path_factory.mktemp("poisoned")
    update = step_loop.apply_outcome

    def apply_outcome(spec: object, state: object, reduced: object, step: int, norm: float) -> None:
        update(spec, state, reduced, step, norm)  # type: ignore[arg-type]
        if step == SAVED - 1:
            state.parameters.mul_(0.5)  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(step_loop, "apply_outcome", apply_outcome)
        return run_of(reference_of(run_in(folder), folder / "alone").home)


def checked(entries: list[Entry]) -> Checker:
    checker = Checker(verify)
    for entry in entries:
        checker.take(entry)
    return checker


def without(entries: list[Entry], *steps: int) -> list[Entry]:
    """The entries without these steps. A view takes over in the second line, and stays."""
    return [it for number, it in enumerate(entries) if number - 2 not in steps]


def sample_in(directory: Path, checker: Checker) -> WorkSample:
    assert checker.spec is not None
    return sample_of(checker.spec, checker.steps, directory, None, lambda step, last: None)


def judged(directory: Path, checker: Checker, first: int = 0, end: int = STEPS + 1) -> Judged:
    """The verdict on all works of these steps, each drawn."""
    works = [it for it in works_of(checker) if first <= it[0] < end]
    return sample_in(directory, checker).judge(works, checker.gaps)


def test_an_honest_run_holds_from_each_checkpoint_to_the_next(honest: Run) -> None:
    found = judged(honest.directory, checked(honest.entries))
    assert found.works == STEPS + 1 and not found.unjudged and not found.passed_over


def test_what_stands_in_a_checkpoint_is_what_the_steps_before_it_led_to(poisoned: Run) -> None:
    checker = checked(poisoned.entries)
    before = judged(poisoned.directory, checker, 0, SAVED - 1)
    assert before.works == SAVED - 1, "all before is honest"
    for first, end in ((0, STEPS + 1), (SAVED - 1, SAVED)):
        with pytest.raises(NotTrue, match="another state") as found:
            judged(poisoned.directory, checker, first, end)
        assert found.value.step == SAVED


@pytest.mark.parametrize("drawn_to", [STEPS + 1, 3])
def test_the_step_before_a_forged_checkpoint_is_left_out(poisoned: Run, drawn_to: int) -> None:
    """Every drawn work was computed rightly from there, so the forger did not say that nothing led
    there."""
    checker = checked(without(poisoned.entries, SAVED - 1))
    found = judged(poisoned.directory, checker, 0, drawn_to)
    assert not found.unjudged and not found.bridged
    assert list(found.open) == [(SAVED - 1, SAVED)]
    assert "not computed as the one before" in found.open[SAVED - 1, SAVED]


@pytest.mark.parametrize("missing", [(SAVED - 2, SAVED - 1), tuple(range(SAVED))])
def test_more_are_left_out_before_it(poisoned: Run, missing: tuple[int, ...]) -> None:
    checker = checked(without(poisoned.entries, *missing))
    found = judged(poisoned.directory, checker)
    assert list(found.open) == [(missing[0], SAVED)] and not found.bridged


@pytest.mark.parametrize("missing", [SAVED - 1, 12, STEPS - 1])
@pytest.mark.parametrize("drawn_to", [STEPS + 1, 3])
def test_a_step_whose_record_is_lost_costs_an_honest_run_nothing(
    honest: Run, missing: int, drawn_to: int
) -> None:
    """The step may be before a checkpoint, between two, or before the end; drawn on the way or
    not."""
    found = judged(honest.directory, checked(without(honest.entries, missing)), 0, drawn_to)
    assert found.bridged == {missing} and not found.open and not found.unjudged


def test_what_follows_a_missing_step_that_is_shown_is_judged_like_all_else(
    honest: Run, tmp_path: Path
) -> None:
    """The states after the missing step were signed, so it was shown. A false work in the next step
    counted as one that could not be judged, because of the missing step."""
    keys = keys_of([honest.home])
    (peer,) = keys
    entries = forged(honest.entries[: 2 + 11], keys, [(10, peer)])
    shutil.copytree(honest.directory / "blobs", tmp_path / "blobs")
    with pytest.raises(NotTrue, match="another work") as found:
        judged(tmp_path, checked(without(entries, 9)))
    assert (found.value.step, found.value.peer_id) == (10, peer)


def test_another_members_transcript_has_what_is_missing(honest: Run, poisoned: Run) -> None:
    late, early = without(honest.entries, *range(12)), without(honest.entries, 15, *range(18, 25))
    checker, added = joined([checked(late), checked(early)])
    assert added == 12 and not checker.gaps and sorted(checker.steps) == list(range(STEPS + 1))
    found = judged(honest.directory, checker)
    assert found.works == STEPS + 1 and not found.open and not found.unjudged
    assert sum(it.stage_steps for it in checker.tallies().values()) == STEPS
    late = without(honest.entries, *range(SAVED + 2))
    checker, added = joined([checked(late), checked(poisoned.entries)])
    assert added == 0 and checker.gaps == [(0, SAVED + 2)], "these lead elsewhere"


def of_a_later_step(directory: Path, at: int, later: int) -> dict[int, bytes]:
    """Another checkpoint lies in the place of one, under its name. Returns its digests, for the
    forger that signs for all."""
    root = directory / "checkpoints"
    place, source = root / f"step-{at:08d}", root / f"step-{later:08d}"
    manifest, digests = read_manifest(place), {}
    for layer in range(LAYERS):
        shutil.copy(layer_path(source, layer), layer_path(place, layer))
        digests[layer] = load_layer(source, layer).file_digest()
    layers = read_manifest(source).layers
    payload = msgspec.json.encode(msgspec.structs.replace(manifest, layers=layers))
    (place / "manifest.json").write_bytes(payload)
    return digests


def test_a_checkpoint_whose_states_are_of_a_later_step_is_no_place_to_start_from(
    honest: Run, tmp_path: Path
) -> None:
    """`verify` went on with the step that the states belong to, found it right, and judged none of
    the drawn works. All from there to the next checkpoint could be forged."""
    shutil.copytree(honest.directory, tmp_path / "run")
    digests = of_a_later_step(tmp_path / "run", 10, SAVED)
    keys = keys_of([honest.home])
    (peer,) = keys

    def state(prepared: Prepared) -> Prepared:
        return (
            msgspec.structs.replace(prepared, states=digests) if prepared.step == 10 else prepared
        )

    works = [(step, peer) for step in range(10, SAVED - 1)]
    checker = checked(forged(honest.entries, keys, works, state=state))
    sample = sample_in(tmp_path / "run", checker)
    sample.judge([(2, peer)])
    with pytest.raises(NotTrue, match=f"is of step {SAVED}"):
        sample.look_at_checkpoints()
    with pytest.raises(NotTrue, match=f"is of step {SAVED}") as found:
        judged(tmp_path / "run", checker, 12, 15)
    assert (found.value.step, found.value.peer_id) == (10, peer)


def test_of_the_checkpoints_beside_it_is_said_which_hold_what_was_signed(
    honest: Run, tmp_path: Path
) -> None:
    """A user who gets a model with a transcript wants to know whether it is the run's."""
    shutil.copytree(honest.directory, tmp_path / "run")
    checker, root = checked(honest.entries), tmp_path / "run" / "checkpoints"
    last = root / f"step-{STEPS:08d}"
    spec, manifest = read_manifest(last).spec(), read_manifest(last)
    states = [load_layer(last, layer) for layer in range(LAYERS)]
    states[1].parameters[0] += 1.0
    save_layers(root, spec, STEPS, manifest.committed_tokens, states[1:2], manifest.lineage)
    sample = sample_in(tmp_path / "run", checker)
    found = sample.judge([it for it in works_of(checker) if it[0] < 2])
    sample.look_at_checkpoints()
    assert found.signed_checkpoints == [10, SAVED], found
    assert len(found.passed_over) == 1 and last.name in found.passed_over[0]
    checker = checked(honest.entries[: 2 + SAVED])
    sample = sample_in(honest.directory, checker)
    found = sample.judge([it for it in works_of(checker) if it[0] < 2])
    sample.look_at_checkpoints()
    assert found.signed_checkpoints == [10], "of the others this transcript says nothing"
    assert len(found.passed_over) == 2, found.passed_over


def test_weights_that_a_run_began_with_are_those_of_their_name(tmp_path: Path) -> None:
    """The weights lie beside the transcript, and come from its giver as well. A giver that named
    well known weights in its run and began with others was believed."""
    run = with_audits(with_given_weights(make_run(tmp_path, 4), "given"))
    of = run_of(reference_of(run, tmp_path / "alone").home)
    checker = checked(of.entries)
    assert judged(of.directory, checker).works == 5
    assert checker.spec is not None
    files = sorted((of.directory / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    weights = next(it for it in files if b'"format":"pt"' in it.read_bytes()[:200])
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        judged(of.directory, checker)


def test_data_that_are_not_all_here_are_told(honest: Run, tmp_path: Path) -> None:
    """A member keeps what it has computed with. Missing data ended in a traceback, as if something
    in the transcript were false."""
    shutil.copytree(honest.directory, tmp_path / "run")
    blobs = (tmp_path / "run" / "blobs").iterdir()
    max(blobs, key=lambda path: path.stat().st_size).unlink()
    with pytest.raises(UserError, match="does not have all of the data"):
        judged(tmp_path / "run", checked(honest.entries))


def of_fewer_tokens(prepared: Prepared) -> Prepared:
    return msgspec.structs.replace(prepared, token_count=prepared.token_count // 2)


def test_a_loss_is_of_as_many_tokens_as_the_step_has(honest: Run) -> None:
    """In the first step of a view any number was accepted, and a forger can begin a view before
    each step."""
    keys = keys_of([honest.home])
    (peer,) = keys
    entries = forged(honest.entries[:3], keys, [(0, peer)], lambda share: share, of_fewer_tokens)
    with pytest.raises(NotTrue, match="its share is"):
        checked(entries)


def ended(places: list[Path], *, sample: str = "1%", allows: bool = False) -> tuple[int, str]:
    """The exit status and the output of `p2p-dtfm verify`. The same works are drawn each time."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        try:
            verify_command(places, sample, 4, None, allows, False)
        except typer.Exit as end:
            return end.exit_code, " ".join(told.getvalue().split())
    return 0, " ".join(told.getvalue().split())


def test_it_says_how_much_is_not_shown_and_ends_so_unless_that_is_allowed(
    honest: Run, tmp_path: Path
) -> None:
    shutil.copytree(honest.directory, tmp_path / "run")
    path = write_entries(tmp_path / "run" / FILE_NAME, without(honest.entries, 3, 8, 9))
    code, said = ended([path])
    assert code == UNJUDGED, said
    assert "led to what follows: 3." in said and "NOT SHOWN: steps 8 to 9 are missing" in said
    assert "2 steps of 24 are not shown" in said, said
    assert ended([path], allows=True)[0] == 0
    assert ended([path], sample="0")[0] == UNJUDGED
    assert ended([path], sample="0", allows=True)[0] == 0
    code, said = ended([path, honest.home])
    assert code == 0 and "3 steps of these came from the other transcripts" in said, said
    code, said = ended([honest.home])
    assert code == 0 and "NOT SHOWN" not in said
    assert f"of step 10, {SAVED}, {STEPS}." in said, said


def test_what_another_has_and_does_not_lead_here_is_told(honest: Run, tmp_path: Path) -> None:
    """One member was killed and came back, and another was killed for good meanwhile: neither has
    the steps between. The user was told to name a transcript that was already named."""
    path = write_entries(tmp_path / FILE_NAME, without(honest.entries, *range(8, 16)))
    (tmp_path / "other").mkdir()
    other = write_entries(tmp_path / "other" / FILE_NAME, honest.entries[: 2 + 13])
    code, said = ended([path, other], sample="0")
    assert code == UNJUDGED and f"{other} has 5 of the missing steps." in said, said
    code, said = ended([path, honest.home], sample="0")
    assert code == 0 and "left out" not in said, said


def test_what_is_said_to_be_enough_is(honest: Run, tmp_path: Path) -> None:
    shutil.copytree(honest.directory / "blobs", tmp_path / "blobs")
    path = write_entries(tmp_path / FILE_NAME, without(honest.entries, *range(2, 7)))
    code, said = ended([path], sample="100%", allows=True)
    assert code == UNJUDGED and "With --allow-gaps" not in said and "ask somebody" not in said, said
    assert "behind missing steps can be judged from the next checkpoint on alone" in said, said
    code, said = ended([path], sample="0")
    assert code == UNJUDGED and "With --allow-gaps" in said, said
    assert ended([path], sample="0", allows=True)[0] == 0


def test_a_damaged_first_line_is_no_lie(honest: Run, tmp_path: Path) -> None:
    path = write_entries(tmp_path / FILE_NAME, honest.entries)
    path.write_bytes(b"?" + path.read_bytes()[1:])
    with pytest.raises(UserError, match="the first line of "):
        ended([path])


@pytest.mark.parametrize("line", [1, 5], ids=("a view", "a step"))
def test_nobody_answers_for_what_its_signature_does_not_cover(
    honest: Run, tmp_path: Path, line: int
) -> None:
    """A view lacked a member's signature, and the program said that it stood under just that one.
    It said the same of a step in which a disk had lost a bit."""
    lines = [line_of(entry) for entry in honest.entries]
    entry = honest.entries[line]
    if isinstance(entry, TookOver):
        ((member, _),) = entry.certificate.ready
        false = msgspec.structs.replace(entry.certificate, ready=((member, bytes(64)),))
        lines[line] = line_of(msgspec.structs.replace(entry, certificate=false))
    else:
        assert isinstance(entry, Committed)
        (signed,) = entry.signed
        payload = signed.payload[:-1] + bytes([signed.payload[-1] ^ 1])
        lines[line] = line_of(Committed((msgspec.structs.replace(signed, payload=payload),)))
    path = tmp_path / FILE_NAME
    path.write_text("\n".join(lines))
    (peer,) = keys_of([honest.home])
    code, said = ended([path], sample="0")
    assert code == 1 and peer in said and "It stands under" not in said, said


def test_a_transcript_that_was_not_judged_is_not_said_to_hold(
    honest: Run, poisoned: Run, tmp_path: Path
) -> None:
    """Of several transcripts the one that has come furthest is judged. Where a stranger's is
    further, and goes another way, nothing at all was said of the one named first."""
    mine = write_entries(tmp_path / FILE_NAME, honest.entries[: 2 + SAVED + 2])
    for sample in ("0", "1%"):
        code, said = ended([mine, poisoned.home], sample=sample, allows=True)
        assert code == UNJUDGED, said
        assert f"NOT SHOWN: {mine} goes another way from step {SAVED}" in said, said
    code, said = ended([poisoned.home, mine], sample="0")
    assert code == 0 and f"{mine} goes another way from step {SAVED}" in said, said
    code, said = ended([mine, honest.home])
    assert code == 0 and "another way" not in said, said


def test_of_several_it_is_said_which_is_refused(honest: Run, tmp_path: Path) -> None:
    false = write_entries(tmp_path / FILE_NAME, [*honest.entries[:4], *honest.entries[3:]])
    code, said = ended([honest.home, false])
    assert code == 1 and said.startswith(f"REFUSED: {false}: "), said
    code, said = ended([false])
    assert code == 1 and said.startswith("REFUSED: step "), said


def test_data_are_taken_from_whichever_member_has_them(honest: Run, tmp_path: Path) -> None:
    """A member that came late has few data; the one that was there from the first step is named
    after it."""
    mine = write_entries(tmp_path / FILE_NAME, honest.entries)
    assert ended([mine, honest.home])[0] == 0
    shutil.copytree(honest.directory / "blobs", tmp_path / "blobs")
    files = (tmp_path / "blobs").iterdir()
    max(files, key=lambda path: path.stat().st_size).unlink()
    assert ended([mine, honest.home], sample="100%")[0] == 0
    with pytest.raises(UserError, match="does not have all of the data"):
        ended([mine])
    elsewhere = tmp_path / "nowhere"
    with pytest.raises(UserError, match="nowhere does not have the data"):
        sample_of(checked(honest.entries).spec, {}, tmp_path, elsewhere, lambda *step: None)  # type: ignore[arg-type]
    assert not elsewhere.exists()


def test_transcripts_of_two_runs_are_not_put_together(honest: Run, tmp_path: Path) -> None:
    spec = checked(honest.entries).spec
    assert spec is not None
    another = spec.model_copy(update={"name": "another"})
    other = Began(format_of(another), another.canonical_bytes())
    path = write_entries(tmp_path / FILE_NAME, [other])
    with pytest.raises(UserError, match="not all of one run"):
        ended([honest.home, path])
