"""The losses of an undisturbed run in one process, on the data that a daemon has trained on."""

from pathlib import Path


def plain_losses(home: Path, steps: int) -> list[float] | None:
    """Of the first `steps` steps of the run at `home`; None where it has saved no checkpoint."""
    from p2p_dtfm.train.data import BlobStore, Dataset, parse_manifest
    from p2p_dtfm.train.model.checkpoint import read_manifest
    from p2p_dtfm.train.model.reference import ReferenceRun
    from p2p_dtfm.train.stage.batches import Batches

    manifests = sorted(home.glob("runs/*/checkpoints/*/manifest.json"))
    if not manifests:
        return None
    spec = read_manifest(manifests[-1].parent).spec()
    blobs = BlobStore(manifests[-1].parents[2] / "blobs")
    held = blobs.path(spec.data.manifest)
    if held is None:
        return None
    manifest = parse_manifest(held.read_bytes(), spec.data.manifest)
    dataset = Dataset(manifest, blobs.path, spec.model.context)
    return list(ReferenceRun(spec, Batches(dataset, spec)).losses(steps))
