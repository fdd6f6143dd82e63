"""What a peer can bring to the next view: states, and what rolls the last step forward."""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.messages.agreement_messages import (
    RETAINED_LIMIT,
    PendingStep,
    RetainedStep,
    SavedState,
)
from p2p_dtfm.core.messages.prepared import StepOutcome, with_room
from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.protocol.lineage import Lineage, extend, unmarked
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.complete_steps import StepKey
from p2p_dtfm.core.recovery.restart_point import Recovery

PENDING_LIMIT_BYTES = 288 * 1024
RETAINED_LIMIT_BYTES = 96 * 1024
"""Prepared of the retained step in a contribution. A contribution also holds a record of at most
64 KiB (`message_bounds.CONTRIBUTION_LIMIT_BYTES`). In a swarm of many, the Prepared that an outline
names travel beside it in one message. Where they do not fit, each member passes on others."""


@dataclass(frozen=True)
class Restart:
    """What this peer does with its states so that an unplanned view can start.

    `outcome` is that of the step before, which may be news here. It follows from `prepared`, if
    those were shown. `roll_forward` are layers to which this peer applies the outcome, with the
    reduced gradients retained from `rolled_view`. `load` are layers to take from the cut or
    checkpoint of the view's first step. `discard` are layers whose states do not lie on the view's
    lineage. All else that the peer's place needs it fetches from a member that has it at the first
    step (`snapshot.held`).
    """

    roll_forward: tuple[int, ...] = ()
    outcome: StepOutcome | None = None
    prepared: tuple[Signed, ...] = ()
    rolled_view: ViewId | None = None
    load: tuple[int, ...] = ()
    discard: tuple[int, ...] = ()


class RecoveryEvidence:
    """What the peer `me` can bring. The caller keeps `held` up to date; when a step commits, this
    class does."""

    def __init__(self, me: str = "") -> None:
        self._me = me
        self.held: dict[int, int] = {}
        self.saved: tuple[SavedState, ...] = ()
        self.cuts: tuple[SavedState, ...] = ()
        """Copies of states as of earlier steps, kept up to date by the caller."""
        self.lineage = Lineage()
        self.retained: RetainedStep | None = None
        self.progress: StageProgress | None = None
        """How far the step's microbatches are; a view that repeats the step may keep that."""
        self._reduced: set[int] = set()
        self._reduced_key: tuple[ViewId, int] | None = None
        self._frozen: tuple[Signed, ...] = ()
        self._frozen_in: ViewId | None = None
        """The newest view whose step under way a failure has frozen. Views without a plan that
        follow it have no steps."""
        self._counts: dict[str, int] = {}

    @property
    def step(self) -> int:
        return self.lineage.length

    def lineages(self) -> dict[int, str]:
        """The digest of each version held."""
        digests = {version: self.lineage.at(version) for version in set(self.held.values())}
        return {version: digest for version, digest in digests.items() if digest is not None}

    def reduced(self, view: ViewId, step: int, layers: set[int]) -> None:
        """Notes that the reduced gradients of `step` for `layers` are here."""
        if self._reduced_key != (view, step):
            self._reduced_key = (view, step)
            self._reduced = set()
        self._reduced |= layers

    @property
    def rollable_steps(self) -> frozenset[tuple[ViewId, int]]:
        """Steps, each in its view, whose gradients here a restart may still name."""
        retained = self.retained
        last = (retained.view, retained.step) if retained is not None else None
        return frozenset(filter(None, (last, self._reduced_key)))

    def freeze(self, ledger: Ledger | None) -> None:
        """From now on, what peers bring to the next view decides about the step under way."""
        self._counts = dict(ledger.counts_of(ledger.step)) if ledger is not None else {}
        if ledger is not None:
            self._frozen_in = ledger.view
            self._frozen = with_room(ledger.freeze(), PENDING_LIMIT_BYTES, self._me)

    def pending(self, view: ViewId) -> PendingStep:
        reduced, said = self._reduced_now(view), self._frozen if self._frozen_in == view else ()
        return PendingStep(
            self.step, self.lineage.digest, said, reduced, self.progress, self._counts
        )

    def told_of_last_step(
        self, planned: bool, sees_fork: bool, trains: bool = True
    ) -> RetainedStep | None:
        """The last step as the next view hears of it. Its Prepared go along only after a failure.
        Where many peers have a stage they are many bytes: they go along only if `sees_fork`,
        when members are seen to have different states. `trains`: this peer's view has a plan."""
        undecided = None if planned or trains else self._undecided()
        retained = undecided if undecided is not None else self.retained
        needed = (retained is not None and len(retained.prepared) <= RETAINED_LIMIT) or sees_fork
        if retained is None:
            return None
        told = needed and not planned
        passed_on = retained.prepared if told else ()
        prepared = with_room(passed_on, RETAINED_LIMIT_BYTES, self._me)
        return msgspec.structs.replace(retained, prepared=prepared)

    def _undecided(self) -> RetainedStep | None:
        """The step that was under way when this peer's last view with steps failed.

        Those that were cut off may have committed it, and only the gradients here take these layers
        along. `pending` tells of steps of the present view alone. Nobody reduces a step before all
        that have a stage have committed the one before, so that one need not be told instead.
        """
        view, step = self._reduced_key or (None, 0)
        layers = tuple(sorted(n for n in self._reduced if self.held.get(n) == step))
        if view is None or step != self.step or not layers:
            return None
        said = self._frozen if self._frozen_in == view else ()
        return RetainedStep(view, step, self.lineage.digest, None, layers, said)

    def _reduced_now(self, view: ViewId) -> tuple[int, ...]:
        return tuple(sorted(self._reduced)) if self._reduced_key == (view, self.step) else ()

    def committed(
        self,
        view: ViewId,
        outcome: StepOutcome,
        stage_layers: range,
        prepared: tuple[Signed, ...] = (),
    ) -> None:
        """The step under way is committed, by these Prepared. The states of `stage_layers` count as
        advanced by it from now on; `applied` says when they are."""
        layers = self._reduced_now(view)
        base = self.lineage.digest
        self.retained = RetainedStep(view, outcome.step, base, outcome, layers, prepared)
        self.lineage.committed(outcome.step, extend(base, outcome.step, view, outcome.digest))
        self.progress = None
        for layer in stage_layers:
            if self.held.get(layer) == outcome.step:
                self.held[layer] = outcome.step + 1

    def applied(self, step: int, layers: Collection[int]) -> None:
        """The states of these layers have taken a committed step. Its gradients are no longer kept
        for these layers; only guarded layers may still wait for them."""
        if self._reduced_key is not None and self._reduced_key[1] == step:
            self._reduced -= set(layers)
        retained = self.retained
        if retained is not None and retained.step == step:
            others = tuple(n for n in retained.reduced_layers if n not in layers)
            self.retained = msgspec.structs.replace(retained, reduced_layers=others)

    def committed_unseen(self, view: ViewId, lineage: str) -> None:
        """The step under way is committed. Its outcome is not known here, only the lineage.

        Once somebody tells the outcome, the step's gradients that are here move guarded layers on.
        """
        step, base = self.step, self.lineage.digest
        self.retained = RetainedStep(view, step, base, None, self._reduced_now(view))
        self.lineage.committed(step, lineage)

    def skip_to(self, view: ViewId, step: int, lineage: str, ledger: Ledger) -> None:
        """Go on to `step` of `view`, which starts from `lineage`, wherever this peer was."""
        while self.step < step:
            known = lineage if self.step + 1 == step else ledger.base_of(self.step + 1)
            if known is None:
                self.retained = None
                self.lineage.move_to(step, lineage)
            else:
                self.committed_unseen(view, known)

    def restart(self, me: Member, recovery: Recovery) -> Restart:
        """Move to the target of an unplanned view."""
        target = recovery.target
        assert target is not None
        there = set(recovery.held.get(me, ()))
        key = recovery.rolled
        gradients = set(self._gradients_of(key)) if key is not None else set()
        roll = [n for n in sorted(there & gradients) if key is not None and self._rolls(n, key)]
        discard = [
            layer
            for layer, version in sorted(self.held.items())
            if layer not in roll
            and not (version == target.step and self._is_at(target.step, target.lineage))
        ]
        if key is not None and recovery.outcome is not None:
            layers = self._gradients_of(key)
            self.retained = RetainedStep(*key, recovery.outcome, layers, recovery.prepared)
        self.lineage.move_to(target.step, target.lineage)
        for layer in discard:
            del self.held[layer]
        load = sorted(there - set(roll) - set(self.held))
        for layer in (*roll, *load):
            self.held[layer] = target.step
        outcome, rolled_view = (recovery.outcome, key[0]) if key else (None, None)
        shown = recovery.prepared if key else ()
        return Restart(tuple(roll), outcome, shown, rolled_view, tuple(load), tuple(discard))

    def _is_at(self, version: int, lineage: str) -> bool:
        """Whether this peer's own lineage at `version` is this one, in whatever epoch it was
        named."""
        mine = self.lineage.at(version)
        return mine is not None and unmarked(mine) == unmarked(lineage)

    def _rolls(self, layer: int, key: StepKey) -> bool:
        _, step, base = key
        return self.held.get(layer) == step and self.lineage.at(step) == base

    def _gradients_of(self, key: StepKey) -> tuple[int, ...]:
        view, step, _ = key
        retained = self.retained
        if retained is not None and (retained.view, retained.step, retained.base) == key:
            return retained.reduced_layers
        if self._reduced_key == (view, step):
            return tuple(sorted(self._reduced))
        return ()
