"""A swarm goes on from given weights: peers fetch them by hash, and train as one machine would."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from p2p_dtfm.cli.commands.models import export
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.lies.lie import MEMORY_VARIABLE
from p2p_dtfm.testbed.local_swarm import LocalSwarm
from p2p_dtfm.train.data import BlobStore, Dataset, parse_manifest
from p2p_dtfm.train.data.tokenizer import ByteTokenizer
from p2p_dtfm.train.hugging_face.export import export_hugging_face
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from p2p_dtfm.train.model.checkpoint import load_layer, read_manifest
from p2p_dtfm.train.model.initial_state import initial_layer_path, initial_layer_state
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.stage.batches import Batches
from tests.e2e.helpers import DEADLINE_S, step_of, wait_until
from tests.e2e.test_daemons import losses
from tests.models.conftest import make_spec, random_states
from tests.models.families import losses_of, made
from tests.train.saved_layers import save_layers

STEPS = 12
KEPT = ("generation_config.json", "tokenizer.json")
EQUAL = "p2p_dtfm.testbed.lies.daemon"


def imported_run(directory: Path) -> Path:
    """A run spec that starts from a model that went through Hugging Face's form."""
    spec = make_spec(layers=4, width=64, heads=2, context=64)
    states = random_states(spec)
    for state in states:
        state.parameters.mul_(0.2)
    checkpoint = save_layers(directory / "old", spec, 0, 0, states)
    export_hugging_face(checkpoint, directory / "hf", ByteTokenizer())
    (directory / "hf" / "generation_config.json").write_text('{"temperature": 0.5}')
    training = Training("python-standard-library", STEPS, 8, 2, 1e-3)
    import_hugging_face(directory / "hf", directory / "new", "", training)
    return directory / "new" / "run.toml"


def run_in(home: Path, steps: int) -> tuple[RunSpec, Dataset]:
    """What a home trained in so many steps, as its last checkpoint says."""
    manifest_path = next(home.glob(f"runs/*/checkpoints/step-{steps:08d}/manifest.json"))
    spec: RunSpec = read_manifest(manifest_path.parent).spec()
    blobs = BlobStore(Home(home).run_directory(spec.digest()) / "blobs")
    path = blobs.path(spec.data.manifest)
    assert path is not None
    manifest = parse_manifest(path.read_bytes(), spec.data.manifest)
    return spec, Dataset(manifest, blobs.path, spec.model.context)


def expected_losses(home: Path, initial: Path, steps: int) -> list[float]:
    """The losses of the plain loop from the same weights."""
    torch.set_num_threads(1)
    spec, dataset = run_in(home, steps)
    reference = ReferenceRun(spec, Batches(dataset, spec))
    for layer, module in enumerate(reference.model):
        state = initial_layer_state(spec, layer, initial_layer_path(initial, layer))
        module.load_state_dict(state.module.state_dict())
    return list(reference.losses(steps))


@pytest.mark.nightly
def test_two_peers_go_on_from_an_imported_model(tmp_path: Path) -> None:
    run = imported_run(tmp_path)
    half = ["--memory-gib", "0.0049"]
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
    export(tmp_path / "out", home=joiner.home)
    theirs, ours = (
        {n: json.loads((tmp_path / d / n).read_text()) for n in KEPT} for d in ("hf", "out")
    )
    # the model states no end: the run's texts say what they end with
    theirs["generation_config.json"]["eos_token_id"] = [0]
    assert ours == theirs


def losses_of_transformers(home: Path, model: PreTrainedModel, steps: int) -> list[float]:
    """The losses of transformers' own model under torch's AdamW, on the run's data."""
    torch.set_num_threads(1)
    spec, dataset = run_in(home, steps)
    return losses_of(model, spec, Batches(dataset, spec), steps)


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["llama3", "qwen3, biases", "gpt2"])
def test_two_by_two_daemons_train_as_transformers_does(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has grouped queries and stretched positions. One daemon is killed, and another one
    joins. The daemons say that they are equal and near, since what a busy machine measures left two
    of them spares."""
    if case == "gpt2":
        model = made(case, vocab_size=256, n_positions=128, n_embd=128, n_inner=512)
    else:
        sizes = {"hidden_size": 128, "intermediate_size": 352, "head_dim": 32}
        model = made(case, vocab_size=256, max_position_embeddings=128, **sizes)
    for parameter in model.parameters():
        parameter.data.mul_(0.4)
    model.save_pretrained(tmp_path / "hf")
    training = Training("python-standard-library", 20, 32, 4, 1e-3)
    import_hugging_face(tmp_path / "hf", tmp_path / "new", "", training)
    run = tmp_path / "new" / "run.toml"
    half_gib = 0.012 if case == "gpt2" else 0.0144
    monkeypatch.setenv(MEMORY_VARIABLE, str(int(half_gib * 2**30)))
    with LocalSwarm(tmp_path, ["--threads", "1", "--exit-when-done"], EQUAL) as swarm:
        founder, address = swarm.found(["--run", str(run), "--expect-peers", "4"])
        others = [swarm.join(address) for _ in range(3)]
        wait_until(lambda: step_of(founder) >= 4, "four steps")
        layers = [tuple(child.status()["layers"]) for child in swarm.children]
        assert sorted(layers) == [(0, 1), (0, 1), (2, 3), (2, 3)]
        os.kill(others[0].process.pid, signal.SIGKILL)
        joiner = swarm.join(address)
        for child in (founder, *others[1:], joiner):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    expected = losses_of_transformers(founder.home, model, 20)
    measured = losses(founder)
    assert sorted(measured) == list(range(20))
    assert max(abs(measured[n] - expected[n]) for n in range(20)) < 1e-4
    assert expected[-1] < expected[0] - 0.05


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case, count, gibibytes",
    [("qwen3", 3, ""), ("gpt2", 4, "0.0040")],
    ids=["somebody holds both ends", "nobody does"],
)
def test_a_tied_head_stays_tied_through_a_join_a_leave_and_a_kill(
    case: str, count: int, gibibytes: str, tmp_path: Path
) -> None:
    """Whichever daemon has a copy of the matrix in the end has the same bits, wherever the copy
    lies."""
    steps, compared = 600, 60
    model = tied_model(case)
    model.save_pretrained(tmp_path / "hf")
    training = Training("python-standard-library", steps, 16, 2, 1e-3)
    import_hugging_face(tmp_path / "hf", tmp_path / "new", "", training)
    run = tmp_path / "new" / "run.toml"
    room = ["--memory-gib", gibibytes] if gibibytes else []
    with LocalSwarm(tmp_path, ["--threads", "1", "--exit-when-done", *room]) as swarm:
        founder, address = swarm.found(["--run", str(run), "--expect-peers", str(count)])
        for _ in range(count - 1):
            swarm.join(address)
        wait_until(lambda: step_of(founder) >= 5, "five steps")
        held = [set(child.status()["layers"]) for child in swarm.children]
        assert any({0, 3} <= each for each in held) is not bool(room)
        # the last one that holds an end: the founder, where the plan gives all layers to it alone
        *_, place = (n for n, layers in enumerate(held) if {0, 3} & layers)
        victim = swarm.children[place]
        rest = [child for child in swarm.children if child is not victim]
        (address, *_) = rest[0].status()["addresses"]
        os.kill(victim.process.pid, signal.SIGKILL)
        at = max(map(step_of, rest))
        wait_until(lambda: max(map(step_of, rest)) >= at + 10, "they go on")
        joiner, leaver = swarm.join(address), rest.pop()
        leaver.process.send_signal(signal.SIGTERM)
        stayed = (joiner, *rest)
        for child in stayed:
            assert child.process.wait(2 * DEADLINE_S) == 0, child.log_tail()
    for child in stayed:
        [checkpoint] = child.home.glob(f"runs/*/checkpoints/step-{steps:08d}")
        embedding, head = load_layer(checkpoint, 0), load_layer(checkpoint, 3)
        elements = 256 * model.config.hidden_size
        for of_embedding, of_head in zip(
            embedding.seen_from_cpu().parts, head.seen_from_cpu().parts, strict=True
        ):
            assert torch.equal(of_embedding[:elements], of_head[-elements:])
    expected = losses_of_transformers(joiner.home, model, steps)
    told = [(step, loss) for child in swarm.children for step, loss in losses(child).items()]
    assert {step for step, _ in told} == set(range(steps))
    assert max(abs(loss - expected[step]) for step, loss in told if step < compared) < 1e-4
    assert expected[-1] < expected[0] - 0.05


def tied_model(case: str) -> PreTrainedModel:
    if case != "gpt2":
        return made(case, vocab_size=256, max_position_embeddings=64, tie_word_embeddings=True)
    model = made(case, vocab_size=256, n_positions=64, n_embd=128, tie_word_embeddings=True)
    for parameter in model.parameters():
        parameter.data.mul_(0.4)
    return model


def test_a_run_spec_without_its_weights_is_refused(tmp_path: Path) -> None:
    run = imported_run(tmp_path)
    (tmp_path / "alone").mkdir()
    lonely = run.rename(tmp_path / "alone" / "run.toml")
    with LocalSwarm(tmp_path) as swarm:
        child = swarm.start(["--run", str(lonely)])
        assert child.process.wait(DEADLINE_S) == 2
        assert "starts from given weights" in child.log_tail()
        assert "initial" in child.log_tail() and "Traceback" not in child.log_tail()
