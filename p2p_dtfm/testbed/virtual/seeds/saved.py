"""What a peer has saved, as a judge reads it: without the daemon's own functions, which a planted
bug may replace."""

import functools
from pathlib import Path

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.train.model.checkpoint import Checkpoint, layer_path, list_checkpoints
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState


def saved_at(peer: Peer, step: int) -> list[Checkpoint]:
    """What the peer has saved of its states before that step."""
    return [it for root in checkpoint_roots(peer.home) for it in list_at(root, step)]


def checkpoint_roots(home: Path) -> list[Path]:
    return sorted(home.glob("runs/*/checkpoints"))


def list_at(root: Path, step: int) -> list[Checkpoint]:
    return [it for it in list_checkpoints(root) if it.manifest.step == step]


def has_saved_all(peer: Peer, step: int) -> bool:
    """Whether it has saved the whole model before that step."""
    return any(map(is_whole, saved_at(peer, step)))


def is_whole(checkpoint: Checkpoint) -> bool:
    """Whether each layer's file is the one that was written."""
    layers = range(layer_count(checkpoint.manifest.spec()))
    return all(payload_of(checkpoint, layer) is not None for layer in layers)


def payload_of(checkpoint: Checkpoint, layer: int) -> bytes | None:
    """The file of a layer; None where it is not there, or not the one that was written."""
    file = checkpoint.manifest.layers.get(str(layer))
    try:
        payload = layer_path(checkpoint.directory, layer).read_bytes()
    except OSError:
        return None
    is_sound = file is not None and digest_bytes(payload) == file.digest
    return payload if is_sound else None


def layer_of(checkpoint: Checkpoint, layer: int) -> LayerState | None:
    """A layer's state; None if its file is not sound."""
    if (payload := payload_of(checkpoint, layer)) is None:
        return None
    where = str(layer_path(checkpoint.directory, layer))
    return LayerState.from_bytes(checkpoint.manifest.spec(), layer, payload, "cpu", where)


@functools.lru_cache(maxsize=64)
def layer_of_one(home: Path, step: int, layer: int) -> LayerState | None:
    """The layer of a run by one process, which all seeds of that run are compared with."""
    (saved,) = (it for root in checkpoint_roots(home) for it in list_at(root, step))
    return layer_of(saved, layer)
