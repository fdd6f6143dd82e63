"""The data shards that a stage reads in a step."""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.step.neighbours import neighbours_of
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.trainer.trainer_state import Outlet, Tools, TrainerState
from p2p_dtfm.net.errors import in_plain_words
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.ports import rarely
from p2p_dtfm.train.data import ShardDamaged, ShardMissing, ShardUnreadable

log = logging.getLogger("p2p_dtfm")

SHARD_RETRY_S = 1.0


class StepShards(NamedTuple):
    """What a stage reads in a step: these training microbatches, and whether held-out ones as
    well."""

    step: int
    microbatches: Sequence[int]
    held_out: bool
    stage_of: str = ""
    """The peer whose stage it is, if another's work is computed again here."""


async def have_shards(
    tools: Tools, outlet: Outlet, state: TrainerState, view: View, plan: Plan, read: StepShards
) -> None:
    """Bring what a stage reads, if it reads any. Ends early when the view is over."""
    if not _reads_data(tools, plan, read):
        return
    try:
        await rarely.lingers("data late")
        await _fetch(tools, outlet, state, view, read)
    finally:
        if state.view is view:  # else the flag is of the next view's states, on their way
            state.fetches = False
        tools.status.troubles.over("data")  # there, or no longer this peer's concern


async def could_have_shards(tools: Tools, outlet: Outlet, plan: Plan, read: StepShards) -> bool:
    """Whether what a stage reads could be had in one try: nothing but an audit waits for it."""
    if not _reads_data(tools, plan, read):
        return True
    try:
        await outlet.fetch_shards(_shards_of(tools, read))
        await _read_ahead(tools, read)
    except (ShardDamaged, ShardUnreadable, ShardMissing, BlobUnavailable, OSError) as error:
        log.warning("an audit goes without data: %s", error)
        return False
    return True


def _reads_data(tools: Tools, plan: Plan, read: StepShards) -> bool:
    beside = neighbours_of(plan, read.stage_of or tools.me, tools.spec)
    is_between = beside[0].before is not None and beside[0].after is not None
    return not is_between or tools.spec.stages_know_tokens


def _shards_of(tools: Tools, read: StepShards) -> set[str]:
    return tools.batches.shards(read.step, read.microbatches, held_out=read.held_out)


async def _read_ahead(tools: Tools, read: StepShards) -> None:
    """Read the data before the step: once it is computed, a disk that fails would cost the step, or
    end the daemon."""
    await tools.compute.run(
        tools.batches.read_ahead,
        read.step,
        read.microbatches,
        held_out=read.held_out,
        of_another=bool(read.stage_of),
    )


async def _fetch(
    tools: Tools, outlet: Outlet, state: TrainerState, view: View, read: StepShards
) -> None:
    needed = _shards_of(tools, read)
    of_no_use = ""
    while not state.is_over(view):
        try:
            state.fetches = True
            if of_no_use:
                await _replace(tools, outlet, state, of_no_use)
                of_no_use = ""
            await outlet.fetch_shards(needed)
            state.fetches = False
            await _read_ahead(tools, read)
            state.stuck_at = None
            return
        except ShardUnreadable as error:
            of_no_use = error.digest
            await _say_unreadable(tools, state, error)
        except ShardDamaged as error:
            log.warning("%s", error.cause)
            if not outlet.damaged_shard(error.digest):
                of_no_use = error.digest
                await _say_unreadable(tools, state, error)
        except ShardMissing as error:
            log.warning("%s", error)
        except BlobUnavailable as error:
            state.stuck_at = state.step
            _say_missing(tools, error)
            await asyncio.sleep(SHARD_RETRY_S)
        except OSError as error:
            _say_unwritten(tools, state, error)
            await asyncio.sleep(SHARD_RETRY_S)


async def _replace(tools: Tools, outlet: Outlet, state: TrainerState, digest: str) -> None:
    """Replace a file by what others give. Where nobody gives it, or the disk takes nothing, the
    file stays and is read again: perhaps its disk was away."""
    try:
        await outlet.replace_shard(digest)
    except BlobUnavailable as error:
        log.debug("%s", error)
    except OSError as error:
        _say_unwritten(tools, state, error)


def _say_unwritten(tools: Tools, state: TrainerState, error: OSError) -> None:
    """Say that this peer waits until there is room, or the disk takes something again."""
    state.stuck_at = state.step
    what = f"a data shard cannot be written: {error.strerror or error}"
    tools.status.say(State.WAITING, f"{what}; free space on that disk, or make it writable")
    tools.status.troubles.tell("data", what, "free space on that disk, or make it writable")


async def _say_unreadable(
    tools: Tools, state: TrainerState, error: ShardDamaged | ShardUnreadable
) -> None:
    """Say that this peer waits, and wait for a moment."""
    state.stuck_at = state.step
    tools.status.say(State.WAITING, f"{error.cause}; it is asked of others, and read again")
    tools.status.troubles.tell("data", error.cause, error.fixes[0])
    await asyncio.sleep(SHARD_RETRY_S)


def _say_missing(tools: Tools, error: BlobUnavailable) -> None:
    """Say that this peer waits until a peer turns up that has the shard, or somebody puts the file
    back."""
    causes = "; ".join(f"{peer}: {in_plain_words(cause)}" for peer, cause in error.causes.items())
    tools.status.troubles.tell(
        "data",
        f"data shard {error.digest[:16]} is missing here, and no peer gives it",
        "start a peer that has it; if these data are your own, make them anew and start again",
    )
    tools.status.say(
        State.WAITING,
        f"data shard {error.digest[:16]} is missing here, and no peer gives it "
        f"({causes or 'there is no other peer'}); it is taken as soon as a peer has it. "
        "If these data are your own: end this daemon, make them anew with the same command and "
        "--overwrite, and start again",
    )
