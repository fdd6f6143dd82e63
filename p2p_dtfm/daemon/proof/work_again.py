"""Steps of a transcript computed once more, and compared with what was claimed and signed.

In runs with audits a claim says by which arithmetic and by how many threads a stage was computed,
and to which gradients it came. So a machine that computes alike can judge works. Any other machine
cannot, and that is said.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from p2p_dtfm.core.audit.boundaries import TRAINING, Due
from p2p_dtfm.core.audit.judging import states_parameters
from p2p_dtfm.core.audit.work import OWN_BYTES, own_digest, work_of
from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.messages.audit_messages import Boundary, Edges, Share
from p2p_dtfm.core.planner.wire_plan import WirePlan, wire_plan
from p2p_dtfm.core.protocol.plan import Plan, Segment
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.schedule.one_order import merged
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.core.schedule.tied_ends import tied_ends
from p2p_dtfm.core.transcript.checking import ODD_FACTS, NotTrue, Step, of_odd_facts
from p2p_dtfm.daemon.step.neighbours import held_out_indices
from p2p_dtfm.daemon.step.reduction.segment_exchange import sum_digest
from p2p_dtfm.daemon.step.stage_account import StageAccount, account_of, norms_of
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import apply_outcome
from p2p_dtfm.train.stage.batches import Batches
from p2p_dtfm.train.stage.replay.arithmetic import arithmetic_name, max_threads
from p2p_dtfm.train.stage.replay.pipelines import Holder, Passed, StepBatches, replay_pipelines
from p2p_dtfm.train.stage.replay.work import (
    ACTIVATION,
    GRADIENT,
    Replayed,
    added,
    bytes_of,
    norms_by_holder,
    parameters_digest,
)
from p2p_dtfm.train.stage.tied_head import counted_once, joined, tie
from p2p_dtfm.train.updates.exact_sums import squared_norm
from p2p_dtfm.train.updates.trimmed_sums import trimmed_over

Tensor = Any


class Unjudged(Exception):
    """A work cannot be judged here: its bits would differ though it were honest."""


class _Computed(NamedTuple):
    works: dict[str, Replayed]
    accounts: dict[str, StageAccount]


class WorkAgain:
    """The states of all layers, from the first step on or from a checkpoint, and the steps that are
    computed from there."""

    def __init__(self, spec: RunSpec, batches: Batches, states: dict[int, LayerState]) -> None:
        self.spec = spec
        self.states = states
        self.judged = 0
        """Stage-steps that were judged."""
        self._batches = batches
        self._terms = terms_of(spec)
        self._arithmetic = arithmetic_name(next(iter(states.values())).device)

    @property
    def step(self) -> int:
        """The step that comes next."""
        return self.states[0].version

    def advance(self, step: Step) -> None:
        """Compute the present step, judge all of it, and make its update, if it trains. Raises
        `NotTrue` and `Unjudged`."""
        plan, number = _plan(step), step.outcome.step
        wire = self._wire(step)
        computed = self._compute(step, plan, wire, number)
        self._judge_works(step, plan, computed)
        if not self._terms.trains(number):
            return
        reduced = self._sums(plan, computed)
        self._judge_sums(step, plan, wire, computed)
        self._judge_norms(step, plan, wire, reduced)
        for layer, state in self.states.items():
            apply_outcome(self.spec, state, reduced[layer], number, step.outcome.gradient_norm)

    def advance_unseen(self, before: Step, number: int) -> None:
        """Make the update of a missing step as if it was computed as the one before it; nothing of
        it is judged. Raises `Unjudged`."""
        plan, wire = _plan(before), self._wire(before)
        computed = self._compute(before, plan, wire, number)
        reduced = self._sums(plan, computed)
        norms = [added_up(self._norms(plan, wire, it, reduced)) for it in plan.segments()]
        for layer, state in self.states.items():
            apply_outcome(self.spec, state, reduced[layer], number, math.sqrt(added_up(norms)))

    def judge_states(self, step: Step) -> bool:
        """Whether the step's Prepared name the states of all layers. Raises `NotTrue` where a
        present state is another than they name."""
        named = set()
        for peer_id, prepared in sorted(step.said.items()):
            for layer, digest in sorted(prepared.states.items()):
                named.add(layer)
                if layer in self.states and self.states[layer].file_digest() != digest:
                    reason = f"layer {layer} has another state than {peer_id} has signed"
                    raise NotTrue(reason, step.outcome.step, peer_id)
        return named >= self.states.keys()

    def _wire(self, step: Step) -> WirePlan:
        """Raises `NotTrue`."""
        try:
            return wire_plan(self.spec, _plan(step), step.view.snapshot)
        except ODD_FACTS as error:
            raise of_odd_facts(step.outcome.step, step) from error

    def _compute(self, step: Step, plan: Plan, wire: WirePlan, number: int) -> _Computed:
        """`number`: the step whose data are taken. Raises `NotTrue` and `Unjudged`."""
        is_judged = number == step.outcome.step
        due = (self._terms.due(number, plan) if is_judged else None) or TRAINING
        passed = _passed(plan, wire) if due.trains else []
        held_out = self._held_out(number, plan, wire, due) if is_judged else []
        works = replay_pipelines(
            self.spec,
            self.states,
            self._holders(step, plan),
            passed,
            self._batches_of(number, [each.number for each in passed], held_out),
        )
        accounts = {
            peer: account_of(plan, wire, peer, work.gradients)
            if due.trains
            else StageAccount({}, {})
            for peer, work in sorted(works.items())
        }
        return _Computed(works, accounts)

    def _judge_works(self, step: Step, plan: Plan, computed: _Computed) -> None:
        for peer in sorted(computed.works):
            self._judge_own(step, plan, peer, computed.works[peer], computed.accounts[peer])

    def _holders(self, step: Step, plan: Plan) -> dict[str, Holder]:
        """Raises `Unjudged`, and `NotTrue` for what nobody can have computed with."""
        found = {}
        for peer in sorted(plan.stage_holders()):
            share = _share_of(step, peer)
            if share.arithmetic != self._arithmetic:
                theirs = share.arithmetic or "none that repeats its bits"
                raise Unjudged(
                    f"{peer} computed by the arithmetic {theirs}, and this machine by "
                    f"{self._arithmetic}: the same work has other bits here"
                )
            if not 0 < share.threads <= max_threads():  # it has as many cores as this machine
                reason = f"{peer} has signed that it computed by {share.threads} threads"
                raise NotTrue(f"{reason}: nobody of its arithmetic does", step.outcome.step, peer)
            found[peer] = Holder(plan.layers_of(peer), share.threads)
        return found

    def _held_out(self, step: int, plan: Plan, wire: WirePlan, due: Due) -> list[Passed]:
        """The held-out microbatches that are part of a work, in order."""
        if not self._terms.evaluates(step):
            return []
        found = []
        for place, pipeline in enumerate(plan.pipelines):
            if len(pipeline.stages) == 1 or due.held_out:
                numbers = held_out_indices(plan, self.spec, place)
                found += [_through(plan, wire, place, number) for number in numbers]
        return sorted(found, key=lambda each: each.number)

    def _batches_of(
        self, step: int, numbers: Sequence[int], held_out: Sequence[Passed]
    ) -> StepBatches:
        reads = bool(held_out)
        self._batches.open_shards(sorted(self._batches.shards(step, numbers, held_out=reads)))
        return StepBatches(
            step,
            lambda number: self._batches(step, number),
            lambda number: self._batches.weight(step, number),
            held_out,
        )

    def _judge_own(
        self, step: Step, plan: Plan, peer_id: str, work: Replayed, account: StageAccount
    ) -> None:
        prepared, number = step.said[peer_id], step.outcome.step
        self.judged += 1
        share = _share_of(step, peer_id)
        self._judge_parameters(share, number, peer_id)
        sent, trains = _edges(share.edges, work), self._terms.trains(number)
        alone = norms_of(self.spec, plan, peer_id, work.gradients if trains else {})
        own = own_digest(account.parts, work.loss_sum, sent, work.held_out_loss_sum, alone)
        if own == work_of(prepared, plan.segments())[:OWN_BYTES]:
            return
        what = "its tensors, its loss or its norm"
        for segment, parts in sorted(account.parts.items()):
            if share.parts.get(segment) != parts:
                first = plan.segments()[segment].first_layer
                what = f"its gradient from layer {first} on"
                break
        raise NotTrue(
            f"{peer_id} has signed another work than it had to do: {what}", number, peer_id
        )

    def _judge_parameters(self, share: Share, number: int, peer_id: str) -> None:
        """Compare the parameters with which a peer states that it began, where it states them."""
        for layer, digest in sorted(share.parameters.items()):
            if parameters_digest(self.states[layer].parameters) != digest:
                reason = f"{peer_id} has signed that it began with another layer {layer}"
                raise NotTrue(reason, number, peer_id)

    def _sums(self, plan: Plan, computed: _Computed) -> dict[int, Tensor]:
        """The sums of all holders' gradients, by layer."""
        reduced: dict[int, Tensor] = {}
        for segment in plan.segments():
            for layer in segment.layers:
                each = [computed.works[peer].gradients[layer] for peer in segment.holders]
                reduced[layer] = added(each, trimmed_over(self.spec, plan, segment))
        if tied_ends(self.spec):
            reduced |= tie(self.spec, reduced)
        return reduced

    def _judge_sums(self, step: Step, plan: Plan, wire: WirePlan, computed: _Computed) -> None:
        """Compare sums as they went over the lines, before anything else is done to them."""
        for number, segment in enumerate(plan.segments()):
            if len(segment.holders) < 2:
                continue
            chunks = wire.chunks[segment.first_layer]
            trimmed = trimmed_over(self.spec, plan, segment)
            cuts = [computed.accounts[holder].cut[number] for holder in segment.holders]
            digests = [
                sum_digest(bytes_of(added([cut.part(chunk) for cut in cuts], trimmed)))
                for chunk in range(len(chunks.bounds))
            ]
            said = {holder: step.said[holder].sums.get(number, ()) for holder in segment.holders}
            for place, holder in enumerate(segment.holders):
                mine = [it for it, by in zip(digests, chunks.owners, strict=True) if by == holder]
                expected = sum_digest(b"".join(mine))
                for peer, sums in said.items():
                    if len(sums) != len(segment.holders) or sums[place] != expected:
                        raise _other(peer, "sum", segment, step)

    def _judge_norms(
        self, step: Step, plan: Plan, wire: WirePlan, reduced: Mapping[int, Tensor]
    ) -> None:
        for number, segment in enumerate(plan.segments()):
            norms = self._norms(plan, wire, segment, reduced)
            for holder in segment.holders:
                stated = _share_of(step, holder).norms.get(number, norms)
                norm = step.said[holder].squared_norms.get(number)
                if (stated, norm) != (norms, added_up(norms)):
                    raise _other(holder, "norm", segment, step)

    def _norms(
        self, plan: Plan, wire: WirePlan, segment: Segment, reduced: Mapping[int, Tensor]
    ) -> tuple[float, ...]:
        """Squared norms: of what each holder has summed, where that is claimed, or of each
        layer."""
        gradients = [reduced[layer] for layer in segment.layers]
        if len(segment.holders) > 1 and states_parameters(plan):  # then no ends are tied
            chunks = wire.chunks[segment.first_layer]
            return norms_by_holder(segment.holders, chunks, joined(gradients))
        both = zip(segment.layers, gradients, strict=True)
        return tuple(squared_norm(counted_once(self.spec, *each)) for each in both)


def _other(peer_id: str, what: str, segment: Segment, step: Step) -> NotTrue:
    first = segment.first_layer
    reason = f"{peer_id} has signed another {what} of the gradients from layer {first} on"
    return NotTrue(reason, step.outcome.step, peer_id)


def _share_of(step: Step, peer_id: str) -> Share:
    """What a peer has stated of its work. Raises `Unjudged`."""
    account = step.said[peer_id].audit
    if account is None:
        raise Unjudged("nobody states by which arithmetic: the run has no audits")
    return account.share


def _plan(step: Step) -> Plan:
    assert isinstance(step.view.plan, Plan), "a step commits by a plan"
    return step.view.plan


def _passed(plan: Plan, wire: WirePlan) -> list[Passed]:
    """All microbatches of a step, in one order that agrees with each peer's own."""
    lists = [tuple(each.microbatches) for each in plan.pipelines]
    pipeline_of = {number: n for n, numbers in enumerate(lists) for number in numbers}
    order = merged(plan, lists, {})
    return [_through(plan, wire, pipeline_of[number], number) for number in order]


def _through(plan: Plan, wire: WirePlan, pipeline: int, number: int) -> Passed:
    """A microbatch through all stages of a pipeline."""
    peers = tuple(stage.peer_id for stage in plan.pipelines[pipeline].stages)
    lines = [wire.boundaries[edge] for edge in itertools.pairwise(peers)]
    return Passed(number, peers, tuple((line.activation, line.gradient) for line in lines))


def _edges(claimed: Edges, work: Replayed) -> Edges:
    """The claimed microbatches, each with what the replayed stage has sent."""
    return {
        number: Boundary(
            b"",
            work.sent.get((ACTIVATION, number), b""),
            b"",
            work.sent.get((GRADIENT, number), b""),
        )
        for number in claimed
    }
