"""How much of a run each peer has computed, by plans and commits: equal on all that saw these.

A step takes each token through each layer once. So a peer's share of a step is counted in tokens
times layers. The shares of a step add up exactly to all of its tokens times all layers.
"""

from collections import Counter
from collections.abc import Mapping

import msgspec

from p2p_dtfm.core.protocol.plan import Plan

SPANS_KEPT = 512
"""Older spans become one sum, of which no step can be taken back any more."""


def shares_of(plan: Plan, tokens_per_microbatch: int) -> dict[str, int]:
    """The share of each stage-holder in one step, in tokens times layers."""
    found: Counter[str] = Counter()
    for pipeline in plan.pipelines:
        tokens = pipeline.microbatch_count * tokens_per_microbatch
        for stage in pipeline.stages:
            found[stage.peer_id] += tokens * (stage.end_layer - stage.first_layer)
    return dict(found)


class StepSpan(msgspec.Struct, forbid_unknown_fields=True):
    """Committed steps of one view."""

    first_step: int
    end_step: int
    shares: dict[str, int]
    """Each peer's share of every one of these steps."""


class Tallies(msgspec.Struct, forbid_unknown_fields=True):
    """What this peer has seen committed, and which peers computed it."""

    spans: list[StepSpan] = msgspec.field(default_factory=list)
    before: dict[str, int] = msgspec.field(default_factory=dict)
    """What each peer computed in the steps of spans that are no longer kept."""
    steps_before: int = 0

    def view_took_over(self, step: int, shares: Mapping[str, int]) -> None:
        """From `step` on the peers in `shares` compute. Steps committed from there on are given up
        and done again."""
        self.spans = [span for span in self.spans if span.first_step < step]
        for span in self.spans:
            span.end_step = min(span.end_step, step)
        self.spans.append(StepSpan(step, step, dict(shares)))
        while len(self.spans) > SPANS_KEPT:
            self._fold(self.spans.pop(0))

    def committed(self, step: int) -> int:
        """Counts `step` as committed, and returns how many steps count that did not before.

        The step may be the last one of the view before, if that is told late. If this peer has
        missed steps of that view since, it does not know who computed `step`, and counts none."""
        later = None
        for span in reversed(self.spans):
            if span.first_step <= step:
                if later is not None and span.end_step < step:
                    return 0
                limit = step + 1 if later is None else min(step + 1, later)
                before, span.end_step = span.end_step, max(span.end_step, limit)
                return span.end_step - before
            later = span.first_step
        return 0

    def share(self, step: int, peer_id: str) -> int:
        """The share of `peer_id` in a step of a kept span, in tokens times layers."""
        for span in reversed(self.spans):
            if span.first_step <= step:
                return span.shares.get(peer_id, 0)
        return 0

    @property
    def first_kept(self) -> int:
        """The first step of the oldest span that is kept; of those before there is a sum alone."""
        return self.spans[0].first_step if self.steps_before and self.spans else 0

    def settle(self, known: Mapping[int, Mapping[str, int]]) -> None:
        """Takes over which peers computed these steps, as all of them have signed, whatever was
        seen here. Steps of which only a sum is kept stay as they are."""
        first_kept = self.first_kept
        for span in _spans_of(known):
            if span.end_step > first_kept:
                span.first_step = max(span.first_step, first_kept)
                self._put(span)
        while len(self.spans) > SPANS_KEPT:
            self._fold(self.spans.pop(0))

    def _put(self, new: StepSpan) -> None:
        """Puts a span in the place of whatever is known of its steps."""
        parts: list[StepSpan] = []
        for span in self.spans:
            if span.first_step < new.first_step:
                end = min(span.end_step, new.first_step)
                parts.append(StepSpan(span.first_step, end, span.shares))
            if span.end_step > new.end_step or span.first_step >= new.end_step:
                first = max(span.first_step, new.end_step)
                parts.append(StepSpan(first, span.end_step, span.shares))
        at = sum(part.first_step < new.first_step for part in parts)
        self.spans = [*parts[:at], new, *parts[at:]]

    def known_before(self, step: int) -> int:
        """How many steps before `step` the board counts."""
        ends = ((span.first_step, min(span.end_step, step)) for span in self.spans)
        return self.steps_before + sum(max(0, end - first) for first, end in ends)

    def of(self, peer_id: str) -> int:
        """What one peer has computed, in tokens times layers."""
        found = self.before.get(peer_id, 0)
        for span in self.spans:
            found += span.shares.get(peer_id, 0) * (span.end_step - span.first_step)
        return found

    def board(self) -> dict[str, int]:
        """Tokens times layers, by peer."""
        found = Counter(self.before)
        for span in self.spans:
            for peer_id, share in span.shares.items():
                found[peer_id] += share * (span.end_step - span.first_step)
        return {peer_id: share for peer_id, share in found.items() if share}

    @property
    def step_count(self) -> int:
        """How many steps the board counts; fewer than the run's where this peer was away."""
        return self.steps_before + sum(span.end_step - span.first_step for span in self.spans)

    def fold_older_half(self) -> bool:
        """Makes room, and returns whether it could. The newest spans stay, since a step of the last
        view may still be told."""
        count = (len(self.spans) - 1) // 2
        for span in self.spans[:count]:
            self._fold(span)
        del self.spans[:count]
        return count > 0

    def _fold(self, span: StepSpan) -> None:
        steps = span.end_step - span.first_step
        self.steps_before += steps
        for peer_id, share in span.shares.items():
            self.before[peer_id] = self.before.get(peer_id, 0) + share * steps


def _spans_of(known: Mapping[int, Mapping[str, int]]) -> list[StepSpan]:
    """The spans of steps that follow one another and have equal shares."""
    found: list[StepSpan] = []
    for step, shares in sorted(known.items()):
        if found and found[-1].end_step == step and found[-1].shares == shares:
            found[-1].end_step = step + 1
        else:
            found.append(StepSpan(step, step + 1, dict(shares)))
    return found
