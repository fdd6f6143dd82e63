"""A swarm trains adapters over a model that its peers hold by hash."""

import os
import signal
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.sections.lora_spec import LoraSpec
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.train.data.blob_store import file_digest
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from tests.e2e.helpers import DEADLINE_S, losses, step_of, wait_until
from tests.e2e.parity import assert_equals_the_plain_loop
from tests.models.families import made

STEPS = 250


def imported_run(directory: Path) -> Path:
    """Adapters over a small Llama whose head is tied; its peers may still hold parts."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "tie_word_embeddings": True}
    model = made("llama3", vocab_size=256, max_position_embeddings=64, **sizes)
    for parameter in model.parameters():
        parameter.data.mul_(0.4)
    model.save_pretrained(directory / "hf")
    lora = LoraSpec(rank=4, alpha=8, targets=("query", "value", "up", "down"))
    training = Training("python-standard-library", STEPS, 16, 2, 3e-4, lora=lora)
    import_hugging_face(directory / "hf", directory / "in", "", training)
    return directory / "in" / "run.toml"


def blobs_of(child: Child) -> set[str]:
    return {path.name for path in child.home.glob("runs/*/blobs/*")}


@pytest.mark.nightly
def test_the_founder_dies_and_the_others_go_on_over_the_same_model(tmp_path: Path) -> None:
    run = imported_run(tmp_path)
    spec = read_run_spec(run)
    workload = workload_of(spec)
    layers = [workload.cost(layer) for layer in range(workload.layer_count)]
    whole = sum(cost.state_bytes for cost in layers)
    given = {file_digest(path) for path in (run.parent / "initial").iterdir()}
    part = ["--memory-gib", f"{(0.75 * whole + 2e6) / 2**30:.5f}"]
    with LocalSwarm(tmp_path, ["--threads", "1", "--exit-when-done", *part]) as swarm:
        founder, address = swarm.found(["--run", str(run), "--expect-peers", "3"])
        others = [swarm.join(address) for _ in range(2)]
        wait_until(lambda: step_of(others[0]) >= 4, "four steps")
        wait_until(lambda: all(given <= blobs_of(child) for child in others), "the whole model")
        os.kill(founder.process.pid, signal.SIGKILL)
        wait_until(lambda: step_of(others[0]) >= 8, "they go on")
        joiner = swarm.join(others[0].status()["addresses"][0])
        for child in (*others, joiner):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    assert losses(joiner), "it has trained"
    logs = [(child.home / "stderr").read_text() for child in swarm.children]
    assert not any("weights: not its place" in log for log in logs), "nobody asked too early"
    assert given <= blobs_of(joiner)
    assert_equals_the_plain_loop(others[0], STEPS, may_repeat=True)
