"""Texts that the model writes while it learns, and from which of its weights."""

from p2p_dtfm.daemon.node.membership import Membership
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.trainer.sample_writer import ModelSource, SampleWriter
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.train.data import load_tokenizer
from p2p_dtfm.train.model.gpt import layer_count, plain_entries
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.lora.frozen_base import attach_held
from p2p_dtfm.train.model.tensor_file import entry_bytes
from p2p_dtfm.train.stage.emulated import emulated_flops_per_s


def sample_writer_of(
    membership: Membership, trainer: Trainer, checkpoints: Checkpoints
) -> SampleWriter | None:
    """None where the owner wants no texts, or the device computes nothing."""
    local, run = membership.local, membership.run
    path = run.blobs.path(run.manifest.tokenizer.digest)
    if not local.settings.samples or path is None or checkpoints.withheld:
        return None
    if emulated_flops_per_s(local.settings.device) is not None:
        return None

    async def saved_layer(layer: int, step: int) -> LayerState:
        """Of a checkpoint, able to compute. Raises `UserError`."""
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
    show = local.observer.show_samples
    shown = local.observer.seen.samples
    return SampleWriter(model, load_tokenizer(path), local.compute, show, shown)
