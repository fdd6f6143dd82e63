"""Lies of peers that see that they are drawn, and go out of an audit's way."""

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from p2p_dtfm.core.audit.told_losses import losses_digest
from p2p_dtfm.core.audit.work import OPENING_BYTES
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.daemon.step.pipeline.microbatches import Microbatches
from p2p_dtfm.daemon.step.pipeline.open_step_work import OpenStepWork
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.daemon.trainer.step_loop import StepLoop
from p2p_dtfm.testbed.lies.gradients import flip, train_with
from p2p_dtfm.testbed.lies.in_words import say_and_believe
from p2p_dtfm.testbed.lies.lie import Lie, put

TRIED = 10_000
LOST = "what goes to another one is lost"


class _Here:
    """What the liar knows of its place."""

    view: Any = None
    """The id of the view in which it last took a step."""
    lies = False
    """Whether it lies in the step under way: the first step of a view is audited whole."""


def _known_where(lie: Lie, in_first: bool) -> _Here:
    """Lies in the first step of each view, or in all other steps."""
    here, one = _Here(), StepLoop._one_step

    async def one_step(self: Any, view: Any, plan: Any, engine: Any) -> None:
        here.lies = (here.view != view.id) == in_first and lie.is_told(self._state.step)
        await one(self, view, plan, engine)
        here.view = view.id

    put(StepLoop, "_one_step", one_step)
    return here


def _flip_where(lie: Lie, in_first: bool) -> _Here:
    here = _known_where(lie, in_first)

    def change(microbatches: Any, step: int, layer: int) -> None:
        if here.lies:
            gradient = microbatches._runner.layer_states[layer].gradient_vector()
            flip(gradient, lie, gradient)

    put(Microbatches, "train", train_with(change))
    return here


async def _have_all_agree_anew(audits: Any, view: Any) -> None:
    """Reports a contradiction, as a peer may that has lost a tensor. It accuses nobody."""
    audits._outlet.contradiction(LOST)
    await audits._state.until_over(view)


async def _until_others_have_claimed(audits: Any, here: Any) -> None:
    while set(here.book.not_claimed()) - {audits._tools.me}:
        if audits._state.is_over(here.view):
            await audits._state.until_over(here.view)
        await audits._state.wait()


def stop_when_drawn(lie: Lie) -> None:
    """Flips gradients, and has all agree anew when it is drawn, before anybody computes its work
    again. The second time it does the step rightly."""
    _stop_where_drawn(lie, _flip_where(lie, in_first=False))


def _stop_where_drawn(lie: Lie, liar: _Here) -> None:
    honest = Audits._audited

    async def audited(self: Any, here: Any) -> Any:
        auditor = here.book.drawn().get(self._tools.me)
        if liar.lies and auditor is not None and auditor not in lie.colluders:
            await _have_all_agree_anew(self, here.view)
        return await honest(self, here)

    put(Audits, "_audited", audited)


def stop_before_it_claims(lie: Lie) -> None:
    """Waits for all others' claims, so that it knows the draw before it says its own claim."""
    liar, honest = _flip_where(lie, in_first=False), Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said, me, book = await honest(self, here, local), self._tools.me, here.book
        if not liar.lies:
            return said
        await _until_others_have_claimed(self, here)
        if _drawn_by(book, me, said).get(me, "") not in ("", *lie.colluders):
            await _have_all_agree_anew(self, here.view)
        return said

    put(Audits, "_claim", claim)


def _drawn_by(book: Any, me: str, said: Any) -> dict[str, str]:
    """Who is drawn for whom, if this peer claims `said`."""
    claims = book._at(book._step).claims
    claims[me] = said
    drawn: dict[str, str] = book.drawn()
    del claims[me]
    book._draw = None
    return drawn


def choose_the_draw(lie: Lie) -> None:
    """Lies in the first step of a view, where nobody has committed itself to an opening. The last
    colluder to speak waits for all others' claims. Then it tries openings until colluders audit the
    colluders."""
    liar, honest = _flip_where(lie, in_first=True), Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said, me, book = await honest(self, here, local), self._tools.me, here.book
        if not liar.lies or me != max(lie.colluders, default=me):
            return said
        await _until_others_have_claimed(self, here)
        for number in range(TRIED):
            other = msgspec.structs.replace(said, opening=number.to_bytes(OPENING_BYTES))
            drawn = _drawn_by(book, me, other)
            if all(drawn.get(it) in lie.colluders for it in lie.colluders if it in drawn):
                return other
        return said

    put(Audits, "_claim", claim)


def claim_another_loss_unless_drawn(lie: Lie) -> None:
    """Claims another loss unless it is drawn. It told the right one, because it did not know the
    draw then."""
    _lie_of_the_loss_unless_drawn(lie, lie.is_told, was_told=False)


def tell_another_loss(lie: Lie) -> None:
    """Tells another loss, and claims it too unless it is drawn. Then it claims the right loss, so
    that an audit finds its work right."""
    liar, honest = _known_where(lie, in_first=False), OpenStepWork.losses_told

    def losses_told(self: Any) -> bytes:
        if not liar.lies:
            return honest(self)
        loss = added_up(self.losses.values()) * (1.0 + lie.strength)
        return losses_digest(loss, self.held_out_loss_sum)

    put(OpenStepWork, "losses_told", losses_told)
    _lie_of_the_loss_unless_drawn(lie, lambda step: liar.lies, was_told=True)


def _lie_of_the_loss_unless_drawn(lie: Lie, is_told: Callable[[int], bool], was_told: bool) -> None:
    """Waits for all others' claims, so that it knows the draw before it says its own claim. Of
    colluders only the last one waits. `was_told` means that it has told the false loss, so that the
    right one does not fit."""
    honest, now = Audits._claim, _Here()

    def changed(local: Any) -> dict[str, Any]:
        return {"loss_sum": local.loss_sum * (1.0 + lie.strength)}

    async def claim(self: Any, here: Any, local: Any) -> Any:
        right, next_opening, me = (
            await honest(self, here, local),
            self._next_opening,
            self._tools.me,
        )
        now.lies = False
        if not local.loss_sum:
            return right
        self._next_opening = right.opening  # the same opening once more
        false = await honest(self, here, dataclasses.replace(local, **changed(local)))
        if me == max(lie.colluders, default=me):
            await _until_others_have_claimed(self, here)
            drawn = _drawn_by(here.book, me, false if was_told else right)
            now.lies = drawn.get(me, "") in ("", *lie.colluders)
        else:
            now.lies = True
        now.lies = now.lies and is_told(here.step)
        if now.lies:
            return false
        self._next_opening = next_opening
        return right

    put(Audits, "_claim", claim)
    say_and_believe(lie, changed, lambda local: now.lies)


EVASIONS = {
    "evade": stop_when_drawn,
    "evade-early": stop_before_it_claims,
    "chosen-draw": choose_the_draw,
    "late-loss": claim_another_loss_unless_drawn,
    "told-loss": tell_another_loss,
}
