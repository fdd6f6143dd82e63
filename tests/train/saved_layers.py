"""Checkpoints for tests, written at once."""

from collections.abc import Iterable
from pathlib import Path

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.checkpoint import OpenCheckpoint
from p2p_dtfm.train.model.layer_state import LayerSnapshot, LayerState


def save_layers(
    root: Path,
    spec: RunSpec,
    step: int,
    committed_tokens: int,
    states: Iterable[LayerState | LayerSnapshot],
    lineage: str = "",
) -> Path:
    """Write the layers' files, then the manifest. Returns the directory of this step. Raises
    `CheckpointFailed`: see `OpenCheckpoint`."""
    root.parent.mkdir(parents=True, exist_ok=True)
    opened = OpenCheckpoint(root, spec, step, committed_tokens, lineage)
    opened.begin()
    for state in states:
        assert state.version == step, (state.layer, state.version, step)
        opened.add(state.layer, state.to_bytes())
    opened.end()
    return opened.directory
