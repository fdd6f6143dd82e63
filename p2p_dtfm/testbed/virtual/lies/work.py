"""Other gradients, sums and losses than were computed, so that all that a liar says of them agrees;
and a note of each step that an honest peer commits."""

from dataclasses import replace
from typing import Any

from p2p_dtfm.daemon.node.membership import Membership
from p2p_dtfm.daemon.step.microbatches import Microbatches
from p2p_dtfm.daemon.step.step_engine import StepEngine
from p2p_dtfm.daemon.step.step_reduction import StepReduction
from p2p_dtfm.daemon.trainer.audits import Audits
from p2p_dtfm.daemon.trainer.step_loop import StepLoop
from p2p_dtfm.testbed.virtual.lies.lying import Deed, Lying
from p2p_dtfm.testbed.virtual.planted.patches import Patches

LEFT_OUT = "leaves out "
LOWER = 0.9
"""A loss that is told to be better than it is."""


def _zeros(gradient: Any, kept: Any) -> None:
    gradient.mul_(0.0)


def _flipped(gradient: Any, kept: Any) -> None:
    gradient.neg_()


def _noise(gradient: Any, kept: Any) -> None:
    """As large as the gradient is, and the same in each run: each element's that of another."""
    gradient.add_(gradient.flip(0))


def _replayed(gradient: Any, kept: Any) -> None:
    """That of the first step in which it lies, again and again; that one it leaves out."""
    gradient.copy_(kept)


GRADIENTS = {"zeros": _zeros, "flipped": _flipped, "noise": _noise, "replayed": _replayed}


def _gradients(patches: Patches, lying: Lying) -> None:
    async def train(self: Any, step: int, replay: Any, on_final: Any = None) -> None:
        kind, told = lying.kind(), on_final or (lambda layer: None)
        if kind in GRADIENTS:

            def final(layer: int) -> None:
                gradient = self._runner.layer_states[layer].gradient_vector()
                kept = lying.kept.setdefault((lying.here(), layer), gradient.clone().zero_())
                honest_one = gradient.clone()
                GRADIENTS[kind](gradient, kept)
                if kind == "replayed" and not kept.any():
                    kept.copy_(honest_one)
                told(layer)

            lying.tell_work(self._mailbox.view, step)
            await honest(self, step, replay, final)
        elif kind == "skipped":
            lying.tell_work(self._mailbox.view, step)
            await _skipping(self, step, replay, told)
        elif kind == "tokens" and self._runner.has_embedding:
            lying.tell_work(self._mailbox.view, step)
            await _with_other_tokens(self, step, replay, told)
        else:
            await honest(self, step, replay, told)

    async def _skipping(self: Any, step: int, replay: Any, told: Any) -> None:
        """The last microbatch is nowhere in the gradients."""
        runner, skipped = self._runner, replay.microbatches[-1]
        backward = runner._layer_backward

        def nothing_of(microbatch: int, layer: int, gradient: Any) -> Any:
            sums = runner.layer_states[layer].gradient_vector()
            before = sums.clone()
            result = backward(microbatch, layer, gradient)
            if microbatch == skipped:
                sums.copy_(before)
            return result

        runner._layer_backward = nothing_of
        try:
            await honest(self, step, replay, told)
        finally:
            del runner._layer_backward

    async def _with_other_tokens(self: Any, step: int, replay: Any, told: Any) -> None:
        """They come backwards."""
        batch = self._batch

        def backwards(step: int, number: int) -> Any:
            tokens, targets = batch(step, number)
            return tokens.flip(-1), targets

        self._batch = backwards
        try:
            await honest(self, step, replay, told)
        finally:
            self._batch = batch

    honest = patches.put(Microbatches, "train", train)


def _sums(patches: Patches, lying: Lying) -> None:
    """Of the others' parts none is in it, and all are told the same."""

    async def reduce(self: Any, segment: Any, states: Any, chunks: Any, reduction: Any) -> None:
        if lying.kind() == "sum" and self._me in chunks.owners:
            add = reduction.add_parts

            def add_mine(chunk: int, parts: Any) -> Any:
                return add(chunk, [part if part is None else part * 0.0 for part in parts])

            lying.tell_work(self._mailbox.view, self._step)
            reduction.add_parts = add_mine
        await honest(self, segment, states, chunks, reduction)

    honest = patches.put(StepReduction, "_reduce", reduce)


def _losses(patches: Patches, lying: Lying) -> None:
    async def run(self: Any, step: int, **how: Any) -> Any:
        result = await honest(self, step, **how)
        if lying.kind() == "loss" and result.loss_sum and how["train"]:
            lying.tell_work(self.view, step)
            return replace(result, loss_sum=LOWER * result.loss_sum)
        return result

    honest = patches.put(StepEngine, "run", run)


def _commits_are_noted(patches: Patches, lying: Lying) -> None:
    async def outcome(self: Any, view: Any, step: int, reduced: Any) -> Any:
        found = await honest(self, view, step, reduced)
        book, deed = self.audits._book, Deed(view.id, step)
        seen = lying.commit(deed, found.digest)
        if seen is not None and book is not None and deed in lying.told:
            seen.drawn |= book.drawn()
            honest_ones = lying.victims(view.plan.stage_holders())
            for liar in lying.told[deed]:
                seen.judges[liar] = sum(book.may_judge(it, liar) for it in honest_ones)
        return found

    honest = patches.put(StepLoop, "_outcome", outcome)


def _denials_are_noted(patches: Patches, lying: Lying) -> None:
    async def account(self: Any, view: Any, plan: Any, step: int, *rest: Any) -> Any:
        said = await honest(self, view, plan, step, *rest)
        denied = (it for it, is_denied in (said.disputed if said else {}).items() if is_denied)
        lying.deny(Deed(view.id, step), len(plan.stage_holders()), denied)
        return said

    honest = patches.put(Audits, "account", account)


def _reports_are_noted(patches: Patches, lying: Lying) -> None:
    def report(self: Any, action: Any) -> None:
        if lying.here() not in lying.ids and action.text.startswith(LEFT_OUT):
            lying.reports.append(action.text)
        honest(self, action)

    honest = patches.put(Membership, "_report", report)


LIES = (
    _gradients,
    _sums,
    _losses,
    _commits_are_noted,
    _denials_are_noted,
    _reports_are_noted,
)
