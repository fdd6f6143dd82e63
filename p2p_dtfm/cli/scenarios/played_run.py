"""The run that a swarm on this machine plays. Its founder gets a changed copy of the run spec. The
copy lies elsewhere than the files that the run spec names relative to itself."""

from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.files import find_run_spec, read_run_spec


def playable(path: Path) -> RunSpec:
    """The run spec as it is. Raises `UserError`, also if its founder would print no address."""
    spec = read_run_spec(path)
    if spec.admission.is_invited:
        raise UserError(
            f"the run {spec.name} is by invitation, and daemons that are played join by an address",
            'name a copy of its run spec without mode = "invited" under [admission]',
        )
    return spec


def run_to_play(name: str) -> RunSpec:
    """A run spec by path or packaged name, changed so that a copy of it elsewhere means the same
    data. Raises `UserError`."""
    from p2p_dtfm.daemon.machine.before_start import source_from_anywhere  # torch, only for these

    path = find_run_spec(name)
    spec = playable(path)
    data = spec.data.model_copy(update={"source": source_from_anywhere(spec, path)})
    return spec.model_copy(update={"data": data})


def bring_weights(name: str, spec: RunSpec, directory: Path) -> None:
    """Link the weights that a run begins with, and their tokenizer, beside the copy of its spec in
    `directory`: there the founder looks for them."""
    from p2p_dtfm.daemon.state_transfer.initial_states import INITIAL_NAME
    from p2p_dtfm.train.data.prepare import TOKENIZER_NAME

    if not spec.model.initial:
        return
    origin = find_run_spec(name).absolute().parent
    for beside in (INITIAL_NAME, TOKENIZER_NAME):
        if (origin / beside).exists():
            (directory / beside).symlink_to(origin / beside)
