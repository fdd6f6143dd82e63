"""Gradients and states that are wrong, lost or doubled."""

import dataclasses
from typing import Any

from p2p_dtfm.core.commit.step import StepTransaction
from p2p_dtfm.core.messages.stage_progress import StageProgress, as_runs
from p2p_dtfm.core.recovery.receipts import Receipts
from p2p_dtfm.daemon.state_transfer.cut_store import CutStore
from p2p_dtfm.daemon.step.pipeline.open_step_work import OpenStepWork
from p2p_dtfm.daemon.trainer.cut_transfers import Cuts
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.restarting import Restarting
from p2p_dtfm.daemon.trainer.step_loop import StepLoop
from p2p_dtfm.net.streams.frames import FrameReader
from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.planted.bug import Planted
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import (
    LATE_WORDS,
    MOMENTS,
    QUICK_STORMS,
    RARER,
    RECIPES,
)
from p2p_dtfm.train.model import optimizer
from p2p_dtfm.train.stage.replica_memory import ReplicaMemory
from p2p_dtfm.train.stage.segment_reduction import SegmentReduction

RARE = 11
"""The bug shows in one step of so many."""


def _what_is_not_kept_counts(patches: Patches) -> None:
    def progress(work: Any) -> Any:
        if not work.forwarded:
            return None
        layers = sorted(work.runner.layer_states)
        return StageProgress(layers[0], layers[-1] + 1, as_runs(work.forwarded), work.backwards)

    patches.put(OpenStepWork, "progress", property(progress))


def _own_gradients_are_hidden(patches: Patches) -> None:
    def keep(loop: Any, view: Any, step: int, reduced: Any) -> None:
        loop._state.reduced.setdefault((view.id, step), {}).update(reduced)

    patches.put(StepLoop, "_keep_reduced", keep)


def _part_counts_twice(patches: Patches) -> None:
    def add_parts(reduction: Any, chunk: int, parts: Any) -> Any:
        if reduction._step % RARE == RARE - 1:
            parts = [part if part is None else part * 2 for part in parts]
        return right(reduction, chunk, parts)

    right = patches.put(SegmentReduction, "add_parts", add_parts)


def _sum_is_not_taken(patches: Patches) -> None:
    def take_sum(reduction: Any, chunk: int, payload: Any) -> None:
        if reduction._step % RARE != RARE - 1:
            right(reduction, chunk, payload)

    right = patches.put(SegmentReduction, "take_sum", take_sum)


def _update_counts_twice(patches: Patches) -> None:
    def apply_outcome(spec: Any, state: Any, gradient: Any, step: int, norm: float) -> None:
        right(spec, state, gradient * (1 + (step % RARE == RARE - 1)), step, norm)

    from p2p_dtfm.daemon.trainer import step_loop

    right = patches.put(step_loop, "apply_outcome", apply_outcome)


def _old_work_is_kept(patches: Patches) -> None:
    """Keeps gradients of an attempt that failed: where the step is repeated, they count once
    more."""

    def begin(work: Any, step: int) -> None:
        if work.step == step:
            work._forget()
        else:
            right(work, step)

    right = patches.put(OpenStepWork, "begin", begin)


def _follower_takes_a_step_twice(patches: Patches) -> None:
    """Applies a step again where a cancelled replay of it is still under way."""

    def replay_outcome(spec: Any, state: Any, gradient: Any, step: int, norm: float) -> None:
        state.version = step
        optimizer.apply_outcome(spec, state, gradient, step, norm)

    from p2p_dtfm.daemon.state_transfer.following import replaying
    from p2p_dtfm.daemon.trainer import restarting

    patches.put(replaying, "replay_outcome", replay_outcome)
    patches.put(restarting, "replay_outcome", replay_outcome)


def _instead(restarting: Any, restart: Any, step: int, **changes: Any) -> Any:
    """Makes a restart with these changes, due in the other one's place: else nothing of it is
    done."""
    changed = dataclasses.replace(restart, **changes)
    restarting._state.restarts[0] = (changed, step)
    return changed


def _rolled_forward_only_in_words(patches: Patches) -> None:
    async def do(restarting: Any, restart: Any, step: int) -> None:
        for layer in restart.roll_forward:
            restarting._state.states[layer].version = step
        await right(restarting, _instead(restarting, restart, step, roll_forward=()), step)

    right = patches.put(Restarting, "do", do)


def _nothing_is_discarded(patches: Patches) -> None:
    async def do(restarting: Any, restart: Any, step: int) -> None:
        for layer in restart.discard:
            if layer in restarting._state.states:
                restarting._state.states[layer].version = step
        await right(restarting, _instead(restarting, restart, step, discard=()), step)

    right = patches.put(Restarting, "do", do)


def _receipts_are_not_waited_for(patches: Patches) -> None:
    patches.put(Receipts, "waits_for", lambda receipts, step: ())


def _guardians_run_ahead(patches: Patches) -> None:
    """Guardians apply steps of which they have not heard that they are committed."""
    patches.put(Followers, "_is_committed", lambda followers, step: True)


def _cuts_are_safe_at_once(patches: Patches) -> None:
    def committed(cuts: Any, view: Any, outcome: Any) -> None:
        right(cuts, view, outcome)
        cuts.whole_step, cuts.is_twice = outcome.step + 1, True

    right = patches.put(Cuts, "committed", committed)


def _whole_cuts_are_dropped(patches: Patches) -> None:
    def keep_from(store: Any, safe: int, is_on_lineage: Any) -> None:
        right(store, safe + 1_000_000, is_on_lineage)

    right = patches.put(CutStore, "keep_from", keep_from)


def _cuts_end_with_their_view(patches: Patches) -> None:
    """A cut that is on its way to a guardian ends when another view takes over, though all stay
    where they are. The next cut waits for it in vain."""

    def go_on(cuts: Any, view: Any, clock: Any, every_steps: int) -> None:
        cuts._view, clock.every_steps = view, every_steps
        cuts._stop_sending()

    patches.put(Cuts, "_go_on", go_on)


def _owed_is_not_kept(patches: Patches) -> None:
    """Loses what a replica owes to the next step's sums, after what it left out of this step's."""

    def commit(memory: Any, step: int, view: Any = None) -> None:
        memory.moments.commit(step, view)

    patches.put(ReplicaMemory, "commit", commit)


def _commits_without_one(patches: Patches) -> None:
    def outcome(transaction: Any) -> Any:
        missing = transaction.missing
        if len(missing) != 1 or len(transaction._holders) < 3:
            return right(transaction)
        (late,) = missing
        other = next(iter(transaction._prepared.values()))
        transaction._prepared[late] = other
        return right(transaction)

    right = patches.put(StepTransaction, "outcome", outcome)


def _payload_is_believed(patches: Patches) -> None:
    def finish(reader: Any) -> Any:
        reader._checksum = reader._header.checksum
        return right(reader)

    right = patches.put(FrameReader, "_finish", finish)


STATES = (
    Planted(
        "own-gradients-hidden",
        "nobody hears of gradients here",
        _own_gradients_are_hidden,
        LATE_WORDS,
    ),
    Planted("part-twice", "a part of a sum counts twice", _part_counts_twice),
    Planted("sum-not-taken", "the sum of the others is not taken", _sum_is_not_taken),
    Planted("update-twice", "a holder applies a gradient twice over", _update_counts_twice),
    Planted("old-work", "gradients of a failed attempt stay in the buffer", _old_work_is_kept),
    Planted("step-twice", "a gradient is applied again", _follower_takes_a_step_twice, MOMENTS),
    Planted(
        "rolled-in-words", "a step rolled forward is not applied", _rolled_forward_only_in_words
    ),
    Planted("nothing-discarded", "states of a lost step stay", _nothing_is_discarded),
    Planted(
        "no-receipts",
        "Prepared does not wait for guardians",
        _receipts_are_not_waited_for,
        QUICK_STORMS,
    ),
    Planted(
        "guardian-ahead",
        "copies move on by steps not committed there",
        _guardians_run_ahead,
        LATE_WORDS,
    ),
    Planted(
        "safe-at-once",
        "what is not copied yet is told to be safe",
        _cuts_are_safe_at_once,
        QUICK_STORMS,
    ),
    Planted("cuts-dropped", "whole cuts are dropped", _whole_cuts_are_dropped),
    Planted(
        "cuts-not-sent-on",
        "a cut that is on its way is not sent on in the next view",
        _cuts_end_with_their_view,
        LATE_WORDS,
    ),
    Planted(
        "owed-not-kept",
        "what a replica has left out of a sum it owes to nobody",
        _owed_is_not_kept,
        RECIPES,
    ),
    Planted("commits-without-one", "one Prepared too few is enough", _commits_without_one),
    Planted(
        "not-kept-counts",
        "work counts of which nothing was kept",
        _what_is_not_kept_counts,
        RARER,
    ),
    Planted("payload-believed", "no checksum is looked at", _payload_is_believed),
)
