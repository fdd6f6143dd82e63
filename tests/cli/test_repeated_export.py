"""Exports while a run trains."""

from pathlib import Path

from p2p_dtfm.cli.commands.models import ExportFormat, _export_once
from p2p_dtfm.cli.commands.offline.repeated_export import RepeatedExport
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.model.checkpoint import list_checkpoints, save_layers
from p2p_dtfm.train.model.layer_state import LayerState
from tests.models.conftest import make_spec, random_states


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
    assert said[0] == "waits: none yet"
    exported = [line.rsplit("step-")[1] for line in said[1:]]
    run = spec.digest()[:8]
    assert exported == [f"{step:08d}-{run}.safetensors" for step in (2, 8, 14, 20)]
    kept = sorted(path.name for path in out.iterdir())
    new = [f"step-{step:08d}-{run}.safetensors" for step in (14, 20)]
    assert kept == sorted(["mine", *others, *new])
