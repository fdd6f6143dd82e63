"""What a swarm committed, against the plain loop in one process on the same data."""

import json

import torch

from p2p_dtfm.core.run_spec import RunSpec
from p2p_dtfm.daemon.local_swarm import Child
from p2p_dtfm.train.batches import Batches
from p2p_dtfm.train.data import BlobStore, Dataset, parse_manifest
from p2p_dtfm.train.reference import ReferenceRun
from tests.e2e.helpers import losses

TOLERANCE = 1e-4


def assert_equals_the_plain_loop(child: Child, steps: int, *, may_repeat: bool = False) -> None:
    """`may_repeat`: steps after the last checkpoint were committed twice, before and after."""
    torch.set_num_threads(1)
    manifest_path = next(child.home.glob("runs/*/checkpoints/*/manifest.json"))
    spec = RunSpec.from_canonical_bytes(
        bytes.fromhex(json.loads(manifest_path.read_text())["run_spec"])
    )
    blobs = BlobStore(next(child.home.glob("runs/*/blobs")))
    path = blobs.path(spec.data.manifest)
    assert path is not None
    manifest = parse_manifest(path.read_bytes(), spec.data.manifest)
    dataset = Dataset(manifest, blobs.path, spec.model.context)
    expected = list(ReferenceRun(spec, Batches(dataset, spec)).losses(steps))
    committed = [
        (event["step"], event["loss"])
        for event in child.events()
        if event["event"] == "step" and event["loss"] is not None
    ]
    if not may_repeat:
        assert [step for step, _ in committed] == sorted(losses(child)), "each step commits once"
    assert sorted(losses(child)) == list(range(steps)), "no step is missing"
    worst = max(abs(loss - expected[step]) for step, loss in committed)
    assert worst < TOLERANCE, f"largest difference {worst}"
