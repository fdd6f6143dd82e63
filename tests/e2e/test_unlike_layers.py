"""Swarms of real daemons that train layers which their run lists one by one."""

import os
import signal
from pathlib import Path

import pytest
import torch

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.plain_losses import comparable
from p2p_dtfm.train.data import BlobStore, Dataset, parse_manifest
from p2p_dtfm.train.model.checkpoint import load_layer
from p2p_dtfm.train.model.generate import whole_checkpoint
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.kinds.registry import with_sizes
from tests.e2e.helpers import DEADLINE_S, losses, run_program, step_of, takes_part, wait_until
from tests.e2e.parity import assert_equals_the_plain_loop

SHARE = 0.7
"""A share of the memory that a replica takes with one microbatch in flight: no daemon holds all
layers."""


def written(directory: Path, name: str, steps: int) -> tuple[Path, RunSpec]:
    """A shipped run for so many steps, gentle enough to be compared."""
    spec = comparable(read_run_spec(name), steps)
    path = directory / "run.json"
    path.write_text(spec.model_dump_json())
    return path, with_sizes(spec)


def memory_of(spec: RunSpec) -> list[str]:
    work = workload_of(spec)
    costs = [work.cost(layer) for layer in range(work.layer_count)]
    whole = sum(cost.state_bytes + cost.saved_bytes for cost in costs)
    return ["--memory-gib", f"{SHARE * whole / 2**30:.6f}"]


@pytest.mark.nightly
def test_blocks_of_unlike_width_survive_a_kill_and_a_join(tmp_path: Path) -> None:
    steps = 70
    path, spec = written(tmp_path, "mixed-width", steps)
    arguments = ["--threads", "1", "--exit-when-done", *memory_of(spec)]
    with LocalSwarm(tmp_path, arguments) as swarm:
        founder, address = swarm.found(["--run", str(path), "--expect-peers", "3"])
        others = [swarm.join(address) for _ in range(2)]
        wait_until(lambda: step_of(founder) >= 12, "a dozen steps")
        held = [child.status()["layers"] for child in (founder, *others)]
        assert all(len(layers) < layer_count(spec) for layers in held), "nobody holds all layers"
        others[1].process.send_signal(signal.SIGKILL)
        wait_until(lambda: step_of(founder) >= 20, "they go on")
        joiner = swarm.join(address)
        for child in (founder, others[0], joiner):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    assert losses(joiner), "it has seen steps"
    assert_equals_the_plain_loop(founder, steps, may_repeat=True)
    for words in (["generate", "--prompt", "a"], ["export", "--out", str(tmp_path / "out")]):
        refused = run_program(*words, "--home", founder.home)
        assert refused.returncode == 2
        assert "lists layers of its own" in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_a_swarm_learns_digits(tmp_path: Path) -> None:
    steps = 400
    path, spec = written(tmp_path, "digits", steps)
    arguments = ["--threads", "1", "--exit-when-done", *memory_of(spec)]
    with LocalSwarm(tmp_path, arguments) as swarm:
        founder, address = swarm.found(["--run", str(path), "--expect-peers", "4"])
        others = [swarm.join(address) for _ in range(3)]
        wait_until(lambda: step_of(founder) >= 10, "ten steps")
        joiner = swarm.join(address)
        wait_until(lambda: takes_part(joiner), "a fifth one takes part")
        os.kill(others[0].process.pid, signal.SIGKILL)
        assert step_of(founder) < steps - 20, "the kill comes while they train"
        for child in (founder, *others[1:], joiner):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    assert losses(joiner), "it has seen steps"
    assert_equals_the_plain_loop(founder, steps, may_repeat=True)
    accuracy = held_out_accuracy(founder)
    print(f"held-out accuracy {accuracy:.4f}")
    assert accuracy >= 0.97


@torch.no_grad()
def held_out_accuracy(child: Child) -> float:
    """The accuracy of the newest whole checkpoint, with nothing but its layers one after
    another."""
    (root,) = child.home.glob("runs/*/checkpoints")
    directory = whole_checkpoint(root)
    first = load_layer(directory, 0)
    spec = first.spec
    layers = [load_layer(directory, layer).module for layer in range(layer_count(spec))]
    blobs = BlobStore(root.parent / "blobs")
    manifest = parse_manifest(blobs.held(spec.data.manifest).read_bytes())
    dataset = Dataset(manifest, blobs.path, spec.model.context)
    right = count = 0
    for index in range(spec.evaluation_microbatches):
        inputs, targets = map(torch.from_numpy, dataset.held_out_microbatch(spec, index))
        stream = inputs
        for layer in layers:
            stream = layer(stream)
        right += int((stream.argmax(dim=1) == targets[:, -1]).sum())
        count += len(targets)
    assert count == spec.evaluation.sequences
    return right / count
