"""The files of a frozen model in a home, and the layers of a checkpoint that lie over them."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.data.blob_store import blobs_in, file_digest
from p2p_dtfm.train.model.checkpoint import load_layer, run_directory_of
from p2p_dtfm.train.model.initial_state import attach_base, parse_initial
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.lora.adapted import has_base


def computing_layer(directory: Path, layer: int) -> nn.Module:
    """A checkpoint's layer, with its frozen parameters from the same home. Raises `UserError`."""
    state = load_layer(directory, layer)
    attach_held(state, _store_beside(directory))
    return state.module


def attach_held(state: LayerState, path_of: Callable[[str], Path | None]) -> None:
    """Give a state that is to compute the frozen parameters of its layer, if it has any. They come
    from files that `path_of` knows by their digest. Raises `UserError`."""
    if has_base(state.module):
        return
    path = base_path(state.spec, state.layer, path_of)
    try:
        attach_base(state, path)
    except (OSError, PeerFault) as error:
        raise _not_here(state.layer, str(error)) from error


def base_path(spec: RunSpec, layer: int, path_of: Callable[[str], Path | None]) -> Path:
    """The path of a layer's file of the frozen model, which is sound. `path_of` knows files by
    their digest.

    Raises `UserError` for a file that is missing or damaged.
    """
    manifest = path_of(spec.model.initial)
    if manifest is None:
        raise _not_here(layer, f"no file {spec.model.initial[:12]}")
    try:
        file = parse_initial(manifest.read_bytes(), spec).layers[layer]
        path = path_of(file.digest)
        if path is None:
            raise _not_here(layer, f"no file {file.digest[:12]}")
        if file_digest(path) != file.digest:
            raise _not_here(layer, f"{path} is damaged")
    except (OSError, PeerFault) as error:
        raise _not_here(layer, str(error)) from error
    return path


def _store_beside(directory: Path) -> Callable[[str], Path | None]:
    store = blobs_in(run_directory_of(directory))
    return store.path if store is not None else lambda digest: None


def _not_here(layer: int, why: str) -> UserError:
    return UserError(
        f"the checkpoint holds adapters, and layer {layer} of the frozen model that they lie over "
        f"is not beside it: {why}",
        (
            "use the checkpoint where it was made: the model lies in the same home, under blobs/",
            "let the daemon take part once more: it fetches the model from the others",
        ),
    )
