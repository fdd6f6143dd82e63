"""Seeded runs of peers that fail: every invariant holds, and a planted bug is found."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.commit.step import StepTransaction
from p2p_dtfm.core.consensus.attempts import freezing
from p2p_dtfm.core.cost_model import cuts
from p2p_dtfm.core.cost_model.cuts import CutClock
from p2p_dtfm.core.membership import eligibility, newcomers
from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.messages.prepared import Prepared, StepOutcome
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery import partial_replay, restart_point
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.recovery.partial_replay import StageReplay
from p2p_dtfm.core.recovery.receipts import Receipts
from p2p_dtfm.sim.faults import drawn_plans
from p2p_dtfm.sim.faults.agreement_seeds import (
    Result,
    SeededRun,
    recoveries_text,
    run_seed,
    seeds_of,
)
from p2p_dtfm.sim.faults.fault_schedule import KINDS
from p2p_dtfm.sim.faults.hash_training import HashState
from p2p_dtfm.sim.faults.simulated_cuts import SimulatedCuts
from p2p_dtfm.sim.faults.simulated_microbatches import SimulatedMicrobatches
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import Key

SEEDS = 6
BATCH = 6
FOUND_WITHIN = 60
FAULTS_AT_LEAST = 10

REGRESSIONS = {
    175: "an attempt that had failed began again under its number, and never settled",
    212: "who missed a takeover took part in the next attempt from a view that the others had left",
    250: "members of a split swarm went to and fro between its parts",
    260: "a newcomer waited for ever for a view of one that had gone over to another in a new life",
    416: "a leaver took the next view for one without it, and left with the last states",
    523: "a guardian had the gradient of the last step, but not its outcome, and the step was lost",
    736: "a newcomer went on alone from the first step when the member that let it in was gone",
    841: "two that waited for lost layers went over to who had founded alone, for good",
    962: "views of peers that knew nobody of one another never met",
    1153: "a newcomer was asked for an answer under numbers that it had passed",
    1343: "two that were ready to go back to an older state asked in turns, twice a second",
    1587: "what a sleeper did alone in a rival view was held against the swarm by who judges",
    1763: "newcomers were told of one view from which theirs came; the others had left that one",
    2062: "a leaver took the only copy of a layer along while others were too few to train",
    2133: "an agreed view waited for a life that had ended",
    2200: "a newcomer reopened a failed attempt by itself, and began at the first step",
    2269: "a leaver stopped in the moment of the takeover, and was waited for and for ever",
    2451: "a crash just after a leaver was let go, before all had followed it to the end",
    3772: "two leavers took the only copies of a layer along, while others dealt with a failure",
    4134: "all who could show a peer what it had signed had started again, and found it a stranger",
    4177: "the last that was left took its states along, though others had only failed",
    5063: "newcomers made a view of their own while members were slow to agree on theirs",
    5084: "a step repeated from a cut was lost, and all that had been given up counted once more",
    6194: "a member crashed just before its view was taken over, and came back: nobody went on",
    7704: "a leaver that waited kept others from going back to what was left",
    9252: "a leaver went with its copy during a failure, and the next one took the last",
    20012: "what newcomers did whose only member had left was held against who woke up later",
}
"""Seeds that broke something when they were found, and what."""


def check(seed: int) -> Result:
    result = run_seed(seed)
    replay = f"python -m p2p_dtfm.sim.faults.agreement_seeds --seeds {seed} --story"
    assert not result.violation, f"{result.violation}\nreplay: {replay}"
    assert result.faults >= FAULTS_AT_LEAST and result.steps >= 3, f"seed {seed} shows nothing"
    return result


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_nothing_breaks_whatever_fails(first: int) -> None:
    results = [check(seed) for seed in range(first, first + BATCH)]
    inflicted = {kind for result in results for kind in result.inflicted}
    assert len(set(KINDS) - inflicted) <= 2, "nearly each kind of fault occurs in so few seeds"
    assert sum(result.kept_forwards for result in results) > 0, "work of failed steps is kept"
    assert sum(result.mended_forwards for result in results) > 0, "and by stand-ins"
    for number, what in enumerate(("lost", "repeated", "late")):
        assert sum(result.messages[number] for result in results) > 0, f"messages are {what}"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [seed for seed in REGRESSIONS if seed >= SEEDS])
def test_what_was_broken_once_stays_mended(seed: int) -> None:
    check(seed)


# the test of the test -------------------------------------------------------------------------


def first_seed_that_fails(
    peer_type: type[SimulatedPeer] = SimulatedPeer,
    says: tuple[str, ...] = ("",),
    loss: float | None = None,
    first: int = 0,
) -> tuple[int, str]:
    """The first seed whose violation has one of these words, and the violation. `loss`: the share
    of messages that get lost until the faults are over."""
    for seed in range(first, first + FOUND_WITHIN):
        run = SeededRun(seed, peer_type)
        if loss is not None:
            run.world.network.loss = loss
        violation = run.run().violation
        if violation and any(word in violation for word in says):
            return seed, violation
    pytest.fail(f"none of {FOUND_WITHIN} seeds from {first} on finds the planted bug")


def without_lagging(monkeypatch: pytest.MonkeyPatch) -> None:
    """All guardians keep up with each step."""
    monkeypatch.setattr(cuts, "LAGGING_STEP_SHARE", 0)
    monkeypatch.setattr(drawn_plans, "_STEPS_NS", (1,))


def test_a_commit_without_all_prepared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StepTransaction.outcome

    def hasty(self: StepTransaction) -> StepOutcome | None:
        if len(self.missing) != 1 or len(self._holders) < 2:
            return original(self)
        held = dict(self._prepared)
        segments = enumerate(self._segments)
        silent = self.missing[0]
        norms = {number: 0.0 for number, segment in segments if silent in segment.holders}
        for other in held.values():
            norms |= {n: norm for n, norm in other.squared_norms.items() if n in norms}
        base = next(iter(held.values())).base
        made_up = Prepared(self.view, self.step, silent, norms, 0.0, 0, 0.0, 0, None, base)
        self._prepared[silent] = made_up
        outcome = original(self)
        self._prepared, self._conflict = held, None
        return outcome

    monkeypatch.setattr(StepTransaction, "outcome", hasty)
    _, violation = first_seed_that_fails()
    assert "samples" in violation or "gradient" in violation or "outcome" in violation


def test_a_merge_that_prefers_the_older_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def oldest(members: Iterable[Member]) -> frozenset[Member]:
        lives: dict[str, int] = {}
        for member in members:
            lives[member.peer_id] = min(lives.get(member.peer_id, member.life), member.life)
        return frozenset(Member(peer_id, life) for peer_id, life in lives.items())

    def older(left: PeerRecord, right: PeerRecord) -> PeerRecord:
        return min(left, right, key=lambda record: record.version)

    monkeypatch.setattr(eligibility, "newest_lives", oldest)
    monkeypatch.setattr(newcomers, "newer", older)
    _, violation = first_seed_that_fails(first=26)
    assert "names" in violation or "has the record" in violation


def test_a_holder_that_does_not_wait_for_its_guardian_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_lagging(monkeypatch)
    monkeypatch.setattr(Receipts, "waits_for", lambda self, step: ())
    _, violation = first_seed_that_fails(says=("loses",), loss=0.15, first=137)
    assert "loses" in violation


def test_a_guardian_that_nobody_waits_for_at_first_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = Receipts.__init__

    def later(self: Receipts, view: ViewId, guards: Mapping[int, str], _: object) -> None:
        begin(self, view, guards, ())

    without_lagging(monkeypatch)
    monkeypatch.setattr(Receipts, "__init__", later)
    _, violation = first_seed_that_fails(says=("loses",), first=14)
    assert "loses" in violation


class FindsAnyStep(SimulatedCuts):
    def find(self, layer: int, step: int, lineage: str) -> HashState | None:
        found = [cut[layer] for cut in self.copies.values() if layer in cut]
        return replace(found[-1], version=step) if found else None


class MixesSteps(SimulatedPeer):
    """A planted bug: takes a copy of any step for one of the step that is asked for."""

    cuts_type = FindsAnyStep


def test_a_cut_of_mixed_steps_that_is_taken_for_whole_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = restart_point._reach

    def any_step(part: Contribution, target: Target, *more: Any) -> tuple[int, ...]:
        copies = {layer for item in part.cuts for layer in item.layers}
        return tuple(sorted(copies | set(original(part, target, *more))))

    monkeypatch.setattr(restart_point, "_reach", any_step)
    _, violation = first_seed_that_fails(MixesSteps, ("wrong state",))
    assert violation


def test_a_receipt_that_counts_for_another_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_step(self: CutClock, sender: str, step: int, layers: Iterable[int]) -> None:
        self._missing.clear()

    monkeypatch.setattr(CutClock, "missing", property(lambda self: frozenset()))
    monkeypatch.setattr(CutClock, "kept", property(lambda self: self.newest))
    monkeypatch.setattr(CutClock, "receipt", any_step)
    _, violation = first_seed_that_fails(says=("loses", "copies"), first=200)
    assert violation


class WithoutViewCheck(SimulatedPeer):
    """A planted bug: takes a tensor of any view for one of the present view."""

    def tensor_key(self, view: ViewId, step: int) -> Key:
        return ViewId(1 << 40, ""), step


class LosesBuffers(SimulatedMicrobatches):
    def _go_on(self, step: int, layers: range, mine: StageReplay) -> None:
        super()._go_on(step, layers, mine)
        self.work.buffers.clear()


class KeepsWhatIsGone(SimulatedPeer):
    """A planted bug: loses its buffers at a takeover, as if it had started again, and says it keeps
    them."""

    microbatches_type = LosesBuffers


def test_keeping_gradients_that_are_gone_is_found() -> None:
    _, violation = first_seed_that_fails(KeepsWhatIsGone)
    assert "samples" in violation


def test_dealing_out_what_a_pipeline_keeps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_again(plan: Plan, begun: Sequence[Sequence[int]]) -> list[list[int]]:
        ranges = (pipeline.microbatches for pipeline in plan.pipelines)
        return [
            [n for n in mine if n not in first] for mine, first in zip(ranges, begun, strict=True)
        ]

    monkeypatch.setattr(partial_replay, "_deal", all_again)
    _, violation = first_seed_that_fails(first=7)
    assert "samples" in violation or "is to keep" in violation


def test_a_stand_in_that_counts_as_another_holder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def each_place(plan: Plan, layer: int) -> tuple[str, ...]:
        stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
        return tuple(stage.peer_id for stage in stages if layer in stage.layers)

    monkeypatch.setattr(Plan, "holders", each_place)
    _, violation = first_seed_that_fails(first=9)
    assert "samples" in violation


def test_counting_on_what_another_state_made_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is rolled forward or goes back, and what was computed of another step counts."""
    original = partial_replay.replay_of

    def any_step(
        plan: Plan, target: Target, contributions: Iterable[Contribution]
    ) -> partial_replay.PartialReplay | None:
        parts = []
        for part in contributions:
            if part.pending is not None:
                pending = msgspec.structs.replace(
                    part.pending, step=target.step, base=target.lineage
                )
                held = dict.fromkeys(part.held, target.step)
                part = msgspec.structs.replace(part, pending=pending, held=held)
            parts.append(part)
        return original(plan, target, parts)

    monkeypatch.setattr(freezing, "replay_of", any_step)
    first_seed_that_fails(first=60)


def test_a_forgotten_view_check_is_found() -> None:
    first_seed_that_fails(WithoutViewCheck, ("samples", "gradient"))


def test_what_a_seed_raises_is_its_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(self: SeededRun) -> bool:
        raise KeyError("not an invariant")

    monkeypatch.setattr(SeededRun, "_look", raises)
    violation = run_seed(0).violation
    assert violation.startswith("KeyError: 'not an invariant'\n") and "in raises" in violation


def test_seeds_that_there_are_not_are_refused() -> None:
    assert (seeds_of("7"), seeds_of("0-2")) == (range(7, 8), range(3))
    for text, cause in (("3-1", "no seed"), ("x", "not A or A-B"), ("-1", "not A"), ("", "not A")):
        with pytest.raises(argparse.ArgumentTypeError, match=cause):
            seeds_of(text)


def test_crashes_after_which_no_step_comes_are_told_of() -> None:
    """The worst crash that was seen is not the worst of all."""
    results = [Result(1, recoveries_ns=[2_000_000_000], watched_crashes=3), Result(2)]
    told = recoveries_text(results)
    assert "worst 2.0 s of 1 (virtual); of 2 more none came" in told
    assert "none in a minute, 2 times" in recoveries_text([Result(1, watched_crashes=2)])
    assert recoveries_text([Result(3)]) == ""
