"""A swarm goes on from given weights: peers fetch them by hash, and train as one machine would."""

from pathlib import Path

import pytest
import torch

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.local_swarm import LocalSwarm
from p2p_dtfm.train.data import BlobStore, Dataset, parse_manifest
from p2p_dtfm.train.data.tokenizer import ByteTokenizer
from p2p_dtfm.train.hugging_face.export import export_hugging_face
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from p2p_dtfm.train.model.checkpoint import read_manifest, save_layers
from p2p_dtfm.train.model.initial_state import initial_layer_path, initial_layer_state
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.stage.batches import Batches
from tests.e2e.helpers import DEADLINE_S
from tests.e2e.test_daemons import losses
from tests.models.conftest import make_spec, random_states

STEPS = 12


def imported_run(directory: Path) -> Path:
    """A run spec that starts from a model that went through Hugging Face's form."""
    spec = make_spec(layers=4, width=64, heads=2, context=64)
    states = random_states(spec)
    for state in states:
        state.parameters.mul_(0.2)
    checkpoint = save_layers(directory / "old", spec, 0, 0, states)
    export_hugging_face(checkpoint, directory / "hf", ByteTokenizer())
    training = Training("python-standard-library", STEPS, 8, 2, 1e-3)
    import_hugging_face(directory / "hf", directory / "new", "", training)
    return directory / "new" / "run.toml"


def expected_losses(home: Path, initial: Path, steps: int) -> list[float]:
    """Those of the plain loop from the same weights."""
    torch.set_num_threads(1)
    manifest_path = next(home.glob(f"runs/*/checkpoints/step-{steps:08d}/manifest.json"))
    spec: RunSpec = read_manifest(manifest_path.parent).spec()
    blobs = BlobStore(Home(home).run_directory(spec.digest()) / "blobs")
    path = blobs.path(spec.data.manifest)
    assert path is not None
    manifest = parse_manifest(path.read_bytes(), spec.data.manifest)
    dataset = Dataset(manifest, blobs.path, spec.model.context)
    reference = ReferenceRun(spec, Batches(dataset, spec))
    for layer, module in enumerate(reference.model):
        state = initial_layer_state(spec, layer, initial_layer_path(initial, layer))
        module.load_state_dict(state.module.state_dict())
    return list(reference.losses(steps))


@pytest.mark.nightly
def test_two_peers_go_on_from_an_imported_model(tmp_path: Path) -> None:
    run = imported_run(tmp_path)
    half = ["--memory-gib", "0.0042"]
    with LocalSwarm(tmp_path, ["--threads", "1", "--exit-when-done", *half]) as swarm:
        founder, address = swarm.found(["--run", str(run), "--expect-peers", "2"])
        joiner = swarm.join(address)
        for child in (founder, joiner):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    assert read_run_spec(run).model.initial
    expected = expected_losses(founder.home, run.parent / "initial", STEPS)
    for child in (founder, joiner):
        measured = losses(child)
        assert sorted(measured) == list(range(STEPS))
        assert max(abs(measured[n] - expected[n]) for n in range(STEPS)) < 1e-4
    blobs = {path.name for path in joiner.home.glob("runs/*/blobs/*")}
    assert read_run_spec(run).model.initial in blobs, "the joiner fetched the weights by hash"


def test_a_run_spec_without_its_weights_is_refused(tmp_path: Path) -> None:
    run = imported_run(tmp_path)
    (tmp_path / "alone").mkdir()
    lonely = run.rename(tmp_path / "alone" / "run.toml")
    with LocalSwarm(tmp_path) as swarm:
        child = swarm.start(["--run", str(lonely)])
        assert child.process.wait(DEADLINE_S) == 2
        assert "starts from given weights" in child.log_tail()
        assert "initial" in child.log_tail() and "Traceback" not in child.log_tail()
