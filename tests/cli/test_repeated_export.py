"""Exports while a run trains."""

import os
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.cli.commands.models import ExportFormat, _export_once, export
from p2p_dtfm.cli.commands.offline.newest_model import newest_checkpoint, run_here, told_of_model
from p2p_dtfm.cli.commands.offline.repeated_export import RepeatedExport
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.lineage import Epochs, marked
from p2p_dtfm.daemon.machine import local_client
from p2p_dtfm.daemon.peers import home_memory
from p2p_dtfm.daemon.peers.home_memory import write_memory
from p2p_dtfm.ports.packages import how_to_install
from p2p_dtfm.train.model import checkpoint as checkpoints
from p2p_dtfm.train.model.checkpoint import list_checkpoints, read_manifest, take_back
from p2p_dtfm.train.model.layer_state import LayerState
from tests.daemon.test_memory import memory_of, place_of
from tests.models.conftest import make_spec, random_states
from tests.train.saved_layers import save_layers


def at(states: list[LayerState], step: int) -> list[LayerState]:
    for state in states:
        state.version = step
    return states


def test_one_every_so_many_steps_and_the_newest_stay(tmp_path: Path) -> None:
    spec, root, out = make_spec(), tmp_path / "runs" / "r" / "checkpoints", tmp_path / "out"
    states = random_states(spec)

    def newest() -> Path:
        found = list_checkpoints(root)
        if not found:
            raise UserError("none yet", "wait")
        return found[0].directory

    def write(directory: Path, target: Path) -> None:
        _export_once(target, directory, ExportFormat.SAFETENSORS, None, False, None)

    repeated = RepeatedExport(newest, write, out, every=6, keep=2, suffix=".safetensors")
    said: list[str] = []
    steps = iter([2, 4, 8, 10, 14, 20])

    def next_step(limit_s: float) -> None:
        save_layers(root, spec, (step := next(steps)), 0, at(states, step))

    (out).mkdir()
    (out / "mine").touch()
    others = ("step-00000001", "step-00009000-01234567.safetensors")  # a checkpoint, another run's
    for name in others:
        (out / name).touch()
    repeated.follow(said.append, next_step)
    assert said[0] == "waits: none yet; wait"
    exported = [line.rsplit("step-")[1] for line in said[1:-1]]
    run = spec.digest()[:8]
    assert exported == [f"{step:08d}-{run}.safetensors" for step in (2, 8, 14, 20)]
    kept = sorted(path.name for path in out.iterdir())
    new = [f"step-{step:08d}-{run}.safetensors" for step in (14, 20)]
    assert said[-1].endswith(f"(model) is complete: its last step is {out / new[1]}")
    repeated.follow(said.append, next_step)
    assert said[-2] == said[-1], "who types it again hears why it ends"
    assert kept == sorted(["mine", *others, *new])


def test_what_the_run_has_taken_back_is_marked_and_goes_first(tmp_path: Path) -> None:
    """The undone export stayed under the highest number, and nothing was exported until training
    had come there again."""
    spec, root, out = make_spec(), tmp_path / "runs" / "r" / "checkpoints", tmp_path / "out"
    states, run = random_states(spec), spec.digest()[:8]

    def write(directory: Path, target: Path) -> None:
        target.write_text(f"{read_manifest(directory).step}")

    def newest() -> Path:
        return list_checkpoints(root)[0].directory

    def names() -> list[str]:
        return sorted(path.name for path in out.iterdir())

    def is_exported(step: int, lineage: str) -> bool:
        save_layers(root, spec, step, 0, at(states, step), lineage)
        return repeated.once(said.append) is not None

    repeated = RepeatedExport(newest, write, out, every=4, keep=3, suffix=".gguf")
    said: list[str] = []
    first = [f"{step:064x}" for step in range(spec.total_steps + 1)]
    assert all(is_exported(step, first[step]) for step in (6, 12, spec.total_steps))
    assert repeated.complete() and not said
    lineage = marked(first[8], Epochs(1, (8,)))
    take_back(root, lineage, 8)
    assert not is_exported(8, lineage), "two steps newer than the newest that counts"
    assert not repeated.complete()
    behind = [f"step-{step:08d}-{run}.gguf" for step in (12, spec.total_steps)]
    assert said == [f"the run went back to step 8: {it} is taken-back-{it} now" for it in behind]
    assert is_exported(10, marked(first[1], Epochs(1, (8,))))
    here = [f"step-00000006-{run}.gguf", f"step-00000010-{run}-epoch-1.gguf"]
    assert names() == [*here, f"taken-back-{behind[1]}"]
    assert is_exported(14, marked(first[2], Epochs(1, (8,))))
    assert names() == [*here, f"step-00000014-{run}-epoch-1.gguf"] and len(said) == 2


def test_an_export_that_cannot_come_to_anything_ends_it_and_says_how_to_mend_it(
    tmp_path: Path,
) -> None:
    spec, root = make_spec(), tmp_path / "runs" / "r" / "checkpoints"
    save_layers(root, spec, 2, 0, at(random_states(spec), 2))
    said: list[str] = []
    waited: list[float] = []

    def write(directory: Path, target: Path) -> None:
        raise UserError("no class of transformers is like it", "choose another form")

    def newest() -> Path:
        return list_checkpoints(root)[0].directory

    repeated = RepeatedExport(newest, write, tmp_path / "out", every=1, keep=1, suffix="")
    with pytest.raises(UserError, match="no class"):
        repeated.follow(said.append, waited.append)
    assert said == ["waits: no class of transformers is like it; choose another form"]
    assert len(waited) == 2


def test_where_the_daemon_has_gone_it_says_that_it_waits_for_it(tmp_path: Path) -> None:
    """The command waited for ever, and said nothing."""
    spec, root = make_spec(), tmp_path / "runs" / "r" / "checkpoints"
    states, said = random_states(spec), list[str]()
    nobody = iter(["", "no daemon", "no daemon", "", "no daemon"])
    repeated = RepeatedExport(
        partial(newest_checkpoint, tmp_path),
        lambda directory, target: target.touch(),
        tmp_path / "out",
        every=1,
        keep=1,
        suffix=".gguf",
        nobody_trains=lambda: next(nobody),
    )
    steps = iter([2, 2, 2, 2, spec.total_steps])

    def next_step(limit_s: float) -> None:
        save_layers(root, spec, (step := next(steps)), 0, at(states, step))

    repeated.follow(said.append, next_step)
    assert said.count("no daemon") == 2 and len(said) == 6


def test_of_several_runs_in_a_home_it_is_the_one_that_it_is_in(tmp_path: Path) -> None:
    """`tiny` was trained to its end, and then a copy of it, under the same name. The old model
    wrote texts and was exported as the new one's, and `export --every` ended with it."""
    older, newer = (make_spec().model_copy(update={"seed": seed}) for seed in (1, 2))
    for spec, used_s in ((newer, 9), (older, 5)):
        memory = memory_of(tmp_path, spec, used_s)
        write_memory(place_of(tmp_path, memory), memory)
    states, root = random_states(older), tmp_path / "runs"
    save_layers(root / older.digest()[:16] / "checkpoints", older, 20, 0, at(states, 20))
    with pytest.raises(UserError, match=f"of run {newer.digest()[:16]}, which") as none_yet:
        newest_checkpoint(tmp_path)
    assert f"of run {older.digest()[:16]} (model), step 20, which" in none_yet.value.fixes[1]
    for step in (4, 2):
        save_layers(root / newer.digest()[:16] / "checkpoints", newer, step, 0, at(states, step))
    found = newest_checkpoint(tmp_path)
    assert found.name == "step-00000004" and found.parents[1].name == newer.digest()[:16]
    assert told_of_model(found) == f"the model of model (run {newer.digest()[:16]}) after step 4"


def test_what_a_home_remembers_is_looked_at_once_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`export --every` said of a damaged file, or of one by a newer version, that it is so, twice a
    second. A command that only reads set the file aside."""
    damaged = tmp_path / "runs" / "old" / "memory.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    looked, checked = list[bytes](), home_memory._checked

    def check(data: bytes, run: str) -> home_memory.Memory:
        looked.append(data)
        return checked(data, run)

    monkeypatch.setattr(home_memory, "_checked", check)
    first, second = (memory_of(tmp_path, make_spec(), used_s) for used_s in (5, 9))
    write_memory(place_of(tmp_path, first), first)
    assert [run_here(tmp_path) for _ in range(5)] == [first.run_digest] * 5
    assert len(looked) == 2 and damaged.exists() and not caplog.text
    write_memory(place_of(tmp_path, second), msgspec.structs.replace(second, written=2))
    run_here(tmp_path)
    assert len(looked) == 4, "it has changed"


def test_what_a_side_that_was_given_up_has_come_to_is_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop trained alone, met its swarm and came over. For as many steps as it had been ahead,
    its own model was exported. `--every` exported nothing, or ended with that model."""
    spec, out, told = make_spec(), tmp_path / "out", list[str]()
    write_memory(place_of(tmp_path, memory := memory_of(tmp_path, spec)), memory)
    root, states = place_of(tmp_path, memory) / "checkpoints", random_states(spec)
    last, daemon = spec.total_steps, dict[str, object]()
    monkeypatch.setattr(local_client, "ask_daemon", lambda home, name: daemon or None)
    for step in (4, 6, last):
        save_layers(root, spec, step, 0, at(states, step))
    daemon |= {"run_digest": spec.digest(), "view": 3, "step": 7, "whole_checkpoint_step": None}
    assert newest_checkpoint(tmp_path).name == "step-00000006", "it has come no further"
    daemon["whole_checkpoint_step"] = 4
    assert newest_checkpoint(tmp_path).name == "step-00000004"
    daemon["view"] = None
    find = partial(newest_checkpoint, tmp_path)
    repeated = RepeatedExport(find, lambda _, to: to.touch(), out, every=1, keep=1, suffix=".gguf")
    assert repeated.once(told.append) is not None and repeated.complete(), "it was the model then"
    daemon |= {"view": 4, "whole_checkpoint_step": 6}
    assert repeated.once(told.append) is not None and not repeated.complete()
    (exported,) = out.iterdir()
    assert exported.name == f"step-00000006-{spec.digest()[:8]}.gguf"
    assert "the run went back to step 6" in told[0]


def test_a_checkpoint_that_is_pruned_as_it_is_found_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` and `export` ended with a traceback, also an export that was to go on with
    `--every`."""
    spec, root = make_spec(), tmp_path / "runs" / "r" / "checkpoints"
    for step in (2, 4):
        save_layers(root, spec, step, 0, at(random_states(spec), step))
    doomed = iter(list_checkpoints(root)[::-1])

    def pruned_meanwhile(root: Path) -> list[checkpoints.Checkpoint]:
        found = list_checkpoints(root)
        checkpoints.remove_checkpoint(next(doomed).directory)
        return found

    monkeypatch.setattr(checkpoints, "list_checkpoints", pruned_meanwhile)
    assert newest_checkpoint(tmp_path).name == "step-00000004"
    with pytest.raises(UserError, match="no whole checkpoint"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("written_s", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_in_a_copy_of_a_home_it_is_the_newest_whatever_the_times_of_its_files(
    tmp_path: Path, written_s: tuple[int, ...]
) -> None:
    """`cp -r` writes directories in any order. An older model was taken, and the exports of later
    ones were marked as taken back. `--every` did not end with the last step."""
    spec, out, told = make_spec(), tmp_path / "out", list[str]()
    write_memory(place_of(tmp_path, memory := memory_of(tmp_path, spec)), memory)
    root, states = place_of(tmp_path, memory) / "checkpoints", random_states(spec)
    steps = (2, 4, spec.total_steps)
    for at_s, step in zip(written_s, steps, strict=True):
        save_layers(root, spec, step, 0, at(states, step))
        os.utime(root / f"step-{step:08d}" / "manifest.json", (at_s, at_s))
    find = partial(newest_checkpoint, tmp_path)
    assert read_manifest(find()).step == spec.total_steps
    repeated = RepeatedExport(find, lambda _, to: to.touch(), out, every=1, keep=3, suffix="")
    assert repeated.once(told.append) is not None and repeated.complete() and not told


def test_who_lags_takes_back_nothing_that_another_has_exported(tmp_path: Path) -> None:
    """Two homes of a run had one `--out`, and the slower one marked the other's exports."""
    spec, states, told = make_spec(), random_states(make_spec()), list[str]()
    repeated = []
    for home, step in (("fast", 8), ("slow", 4)):
        save_layers(root := tmp_path / home, spec, step, 0, at(states, step))
        newest = partial(lambda root: list_checkpoints(root)[0].directory, root)
        to = tmp_path / "out"
        repeated.append(RepeatedExport(newest, lambda _, to: to.touch(), to, 1, 3, ".gguf"))
    for each in repeated * 2:
        each.once(told.append)
    assert not told


def test_what_can_be_known_before_the_first_checkpoint_is_said_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "is no directory that import made"
    with pytest.raises(UserError, match=told):
        export(tmp_path / "out", imported=tmp_path, every=5, keep=1, home=tmp_path / "home")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="needs the package gguf") as refused:
        export(tmp_path / "out", form=ExportFormat.GGUF, every=5, keep=1, home=tmp_path / "home")
    assert how_to_install("gguf") in refused.value.fixes
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file"):
        export(tmp_path / "file", every=5, keep=1, home=tmp_path / "home")
