"""What this disk has of a run from before: whether this peer could go on from it alone."""

from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.view_history import ViewHistory
from p2p_dtfm.daemon.peers.home_memory import Memory
from p2p_dtfm.daemon.peers.run_source import is_here
from p2p_dtfm.train.data import BlobStore
from p2p_dtfm.train.model.checkpoint import list_checkpoints
from p2p_dtfm.train.model.gpt import layer_count


def was_in(home: Home, run_digest: str) -> bool:
    """Whether this home was in the run, by what else is on the disk where its memory of the run is
    gone."""
    is_damaged = any(home.run_directory(run_digest).glob("memory*.damaged"))
    views = ViewHistory(home.root, run_digest).read()
    return bool(is_damaged or views or list_checkpoints(home.checkpoints(run_digest), run_digest))


def whole_step(home: Home, recalled: Memory) -> int:
    """The step of the newest whole checkpoint on this disk; 0 without one."""
    layers, run = layer_count(recalled.spec), recalled.run_digest
    saved = list_checkpoints(home.checkpoints(run), run)
    whole = (it.manifest.step for it in saved if len(it.layers) == layers)
    return max(whole, default=0)


def why_not_alone(home: Home, me: str, recalled: Memory, store: BlobStore) -> str:
    """What this disk lacks to go on by itself; empty if it lacks nothing."""
    founded_it = recalled.signed_spec.peer_id == me
    if not (founded_it or whole_step(home, recalled) > 0):
        return "another founded it, and no whole checkpoint is here: start one of the others"
    if is_here(recalled.signed_spec, store):
        return ""
    remedy = "start one of the others, who have them"
    if founded_it:
        remedy += ", or make them anew with the line that founded it, p2p-dtfm --run FILE"
    return f"its manifest or tokenizer is missing or damaged in {store.root}: {remedy}"
