"""Texts that the model writes while it learns, and the weights that it writes them with."""

from msgspec.structs import replace

from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.membership import Membership
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.trainer.sample_writer import ModelSource, SampleWriter
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.train.model.gpt import layer_count, plain_entries
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.lora.frozen_base import attach_held
from p2p_dtfm.train.model.tensor_file import entry_bytes
from p2p_dtfm.train.stage.emulated import emulated_flops_per_s


def sample_writer_of(
    membership: Membership, trainer: Trainer, checkpoints: Checkpoints
) -> SampleWriter | None:
    """The writer of this daemon's texts. None where it will write none; the page then says why."""
    local, run = membership.local, membership.run
    show, shown = local.observer.show_samples, local.observer.seen.samples
    if why_none := _why_none(local.settings, bool(checkpoints.withheld)):
        show(replace(shown, note=f"none is written here: {why_none}"))
        return None

    async def saved_layer(layer: int, step: int) -> LayerState:
        """A layer of a checkpoint, able to compute. Raises `UserError`."""
        state = await checkpoints.load(layer, step)
        await local.compute.run(attach_held, state, run.blobs.path)
        return state

    layers = range(layer_count(run.spec))
    entries = [entry for layer in layers for entry in plain_entries(run.spec, layer)]
    model = ModelSource(
        run.spec,
        lambda: trainer.states,
        lambda: checkpoints.whole_step,
        saved_layer,
        sum(map(entry_bytes, entries)),
    )
    return SampleWriter(model, run.tokenizer, local.compute, show, shown)


def _why_none(settings: Settings, is_withheld: bool) -> str:
    """Why this daemon writes no texts as long as it lives; empty if it does."""
    if not settings.samples:
        return "its owner wants none (--no-samples)"
    if emulated_flops_per_s(settings.device) is not None:
        return "an emulated device computes nothing"
    if is_withheld:
        return "this run leaves its first and last layers to members that it names"
    return ""
