"""Lies of who sees that it is drawn, and goes out of an audit's way."""

from typing import Any

import msgspec

from p2p_dtfm.core.audit.claim_book import OPENING_BYTES
from p2p_dtfm.daemon.step.microbatches import Microbatches
from p2p_dtfm.daemon.trainer.audits import Audits
from p2p_dtfm.daemon.trainer.step_loop import StepLoop
from p2p_dtfm.testbed.lies.gradients import flip
from p2p_dtfm.testbed.lies.lie import Lie, put

TRIED = 10_000
LOST = "what goes to another one is lost"


class _Here:
    """Where the liar stands."""

    view: Any = None
    """In which it has taken a step."""
    lies = False
    """In the step under way: the first one of a view is audited whole."""


def _flip_where(lie: Lie, in_first: bool) -> _Here:
    """In the first steps of views, or in all others."""
    here, honest, one = _Here(), Microbatches.train, StepLoop._one_step

    async def one_step(self: Any, view: Any, plan: Any, engine: Any) -> None:
        here.lies = (here.view != view.id) == in_first and lie.is_told(self._state.step)
        await one(self, view, plan, engine)
        here.view = view.id

    async def train(self: Any, step: int, replay: Any, on_final: Any = None) -> None:
        def final(layer: int) -> None:
            if here.lies:
                gradient = self._runner.layer_states[layer].gradient_vector()
                flip(gradient, lie, gradient)
            on_final(layer)

        await honest(self, step, replay, final)

    put(StepLoop, "_one_step", one_step)
    put(Microbatches, "train", train)
    return here


async def _have_all_agree_anew(audits: Any, view: Any) -> None:
    """As may who has lost a tensor. It accuses nobody."""
    audits._outlet.contradiction(LOST)
    await audits._until_over(view)


def stop_when_drawn(lie: Lie) -> None:
    """Before anybody has computed its work again; the second time it does the step rightly."""
    liar, honest = _flip_where(lie, in_first=False), Audits._audited

    async def audited(self: Any, here: Any) -> Any:
        auditor = here.book.drawn().get(self._tools.me)
        if liar.lies and auditor is not None and auditor not in lie.fellows:
            await _have_all_agree_anew(self, here.view)
        return await honest(self, here)

    put(Audits, "_audited", audited)


def stop_before_it_claims(lie: Lie) -> None:
    """It waits for all others' claims, and knows the draw before it has said its own."""
    liar, honest = _flip_where(lie, in_first=False), Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said, me, book = await honest(self, here, local), self._tools.me, here.book
        if not liar.lies:
            return said
        while set(book.not_claimed()) - {me}:
            if self._state.is_over(here.view):
                await self._until_over(here.view)
            await self._state.wait()
        if _drawn_by(book, me, said).get(me, "") not in ("", *lie.fellows):
            await _have_all_agree_anew(self, here.view)
        return said

    put(Audits, "_claim", claim)


def _drawn_by(book: Any, me: str, said: Any) -> dict[str, str]:
    """Whom it draws for whom, if this peer says that."""
    claims = book._at(book._step).claims
    claims[me] = said
    drawn: dict[str, str] = book.drawn()
    del claims[me]
    book._draw = None
    return drawn


def choose_the_draw(lie: Lie) -> None:
    """In the first step of a view, where nobody has committed itself to an opening: the last of the
    fellows to speak waits for all others' claims, and tries openings until fellows audit them."""
    liar, honest = _flip_where(lie, in_first=True), Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said, me, book = await honest(self, here, local), self._tools.me, here.book
        if not liar.lies or me != max(lie.fellows, default=me):
            return said
        while set(book.not_claimed()) - {me}:
            if self._state.is_over(here.view):
                await self._until_over(here.view)
            await self._state.wait()
        for number in range(TRIED):
            other = msgspec.structs.replace(said, opening=number.to_bytes(OPENING_BYTES))
            drawn = _drawn_by(book, me, other)
            if all(drawn.get(it) in lie.fellows for it in lie.fellows if it in drawn):
                return other
        return said

    put(Audits, "_claim", claim)


EVASIONS = {
    "evade": stop_when_drawn,
    "evade-early": stop_before_it_claims,
    "chosen-draw": choose_the_draw,
}
