"""What is needed to compute a run again, from the directory where a daemon has kept it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.transcript.checking import Step
from p2p_dtfm.daemon.proof.sample_again import WorkSample
from p2p_dtfm.train.data import BlobStore, Dataset, blobs_in, file_digest, parse_manifest
from p2p_dtfm.train.data.manifest import MANIFEST_LIMIT_BYTES
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.initial_state import initial_layer_state, parse_initial
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.batches import Batches

Tell = Callable[[int, int], None]


class _Blobs:
    """Blobs in several places, of which none need have all."""

    def __init__(self, places: Sequence[Path]) -> None:
        """`places`: directories of runs, or of blobs."""
        self.named = " and ".join(map(str, places))
        self._stores = [blobs_in(it) or BlobStore(it) for it in places if it.is_dir()]

    def path(self, digest: str) -> Path | None:
        found = (store.path(digest) for store in self._stores)
        return next((path for path in found if path is not None), None)


def sample_of(
    spec: RunSpec,
    steps: Mapping[int, Step],
    run: Path,
    data: Path | None,
    tell: Tell,
    others: Sequence[Path] = (),
) -> WorkSample:
    """`run`: the run's directory in a home, with its checkpoints and, unless `data` says where they
    are, its data. What it lacks of the data may be in one of `others`. Raises `UserError`."""
    blobs = _Blobs([data] if data is not None else list(dict.fromkeys((run, *others))))
    held = blobs.path(spec.data.manifest) if spec.data.manifest else None
    if held is None:
        raise UserError(
            f"{blobs.named} does not have the data that this run was trained on",
            "name a directory that has: --data DIR, the run's directory in a member's home, or the "
            "directory that p2p-dtfm prepare wrote",
        )
    try:
        manifest = parse_manifest(_beginning(held), spec.data.manifest)
        dataset = Dataset(manifest, partial(_shard, blobs), spec.model.context)
        batches = Batches(dataset, spec)
    except PeerFault as fault:
        raise UserError(
            f"the data in {blobs.named} are damaged: {fault.cause}", "copy them anew"
        ) from fault
    return WorkSample(
        spec, steps, batches, lambda: _genesis(spec, blobs), run / "checkpoints", tell
    )


def _beginning(path: Path) -> bytes:
    """A little more of a file than may be in one that names others: a stranger's file of any size
    may lie under that name."""
    with path.open("rb") as file:
        return file.read(MANIFEST_LIMIT_BYTES + 1)


def _shard(blobs: _Blobs, digest: str) -> Path:
    """The file of a shard. A member keeps no more of the data than it has computed with. Raises
    `UserError`."""
    path = blobs.path(digest)
    if path is None:
        raise UserError(
            f"{blobs.named} does not have all of the data that this run was trained on: it lacks "
            f"{digest}",
            "name a directory that has: --data DIR, such as the one that p2p-dtfm prepare wrote",
        )
    return path


def _genesis(spec: RunSpec, blobs: _Blobs) -> dict[int, LayerState]:
    """The states before the first step. Raises `UserError`."""
    layers = range(layer_count(spec))
    if not spec.model.initial:
        return {layer: LayerState.genesis(spec, layer) for layer in layers}
    held = blobs.path(spec.model.initial)
    try:
        if held is not None:
            named = parse_initial(_beginning(held), spec).layers
            paths = [blobs.path(file.digest) for file in named]
            if None not in paths:
                found = [path for path in paths if path]
                for file, path in zip(named, found, strict=True):
                    if file_digest(path) != file.digest:  # a name is no proof to a stranger
                        raise PeerFault(f"{path} is another file than its name says")
                return {n: initial_layer_state(spec, n, found[n]) for n in layers}
    except PeerFault as fault:
        raise UserError(
            f"the weights it began with are damaged: {fault.cause}", "copy them anew"
        ) from fault
    raise UserError(
        f"{blobs.named} does not have the weights that this run began with",
        "name a directory that has: --data DIR, the run's directory in a member's home",
    )
