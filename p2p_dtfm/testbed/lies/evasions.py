"""Lies of who sees that it is drawn, and goes out of an audit's way."""

from typing import Any

from p2p_dtfm.daemon.step.microbatches import Microbatches
from p2p_dtfm.daemon.trainer.audits import Audits
from p2p_dtfm.daemon.trainer.step_loop import StepLoop
from p2p_dtfm.testbed.lies.gradients import flip
from p2p_dtfm.testbed.lies.lie import Lie, put

LOST = "what goes to another one is lost"


class _Here:
    """Where the liar stands."""

    view: Any = None
    """In which it has taken a step."""
    lies = False
    """In the step under way: the first one of a view is audited whole."""


def _flip_but_in_first(lie: Lie) -> _Here:
    here, honest, one = _Here(), Microbatches.train, StepLoop._one_step

    async def one_step(self: Any, view: Any, plan: Any, engine: Any) -> None:
        here.lies = here.view == view.id and lie.is_told(self._state.step)
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
    liar, honest = _flip_but_in_first(lie), Audits._audited

    async def audited(self: Any, here: Any) -> Any:
        auditor = here.book.drawn().get(self._tools.me)
        if liar.lies and auditor is not None and auditor not in lie.fellows:
            await _have_all_agree_anew(self, here.view)
        return await honest(self, here)

    put(Audits, "_audited", audited)


def stop_before_it_claims(lie: Lie) -> None:
    """It waits for all others' claims, and knows the draw before it has said its own."""
    liar, honest = _flip_but_in_first(lie), Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said, me, book = await honest(self, here, local), self._tools.me, here.book
        while liar.lies and set(book.not_claimed()) - {me}:
            if self._state.is_over(here.view):
                await self._until_over(here.view)
            await self._state.wait()
        if liar.lies and _auditor(book, me, said) not in ("", *lie.fellows):
            await _have_all_agree_anew(self, here.view)
        return said

    put(Audits, "_claim", claim)


def _auditor(book: Any, me: str, said: Any) -> str:
    """Whom it draws for this peer, if it says that; empty: nobody."""
    claims = book._at(book._step).claims
    claims[me] = said
    auditor: str = book.drawn().get(me, "")
    del claims[me]
    book._draw = None
    return auditor


EVASIONS = {"evade": stop_when_drawn, "evade-early": stop_before_it_claims}
