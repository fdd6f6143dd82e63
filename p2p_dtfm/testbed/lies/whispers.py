"""Lies of auditors that tell one member something else of a work than the others, or nothing.

The work is a colluder's. It lies in its work where only colluders are drawn for it. It claims last,
and knows the draw by then.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from p2p_dtfm.core.messages.audit_messages import COULD_NOT, Audited, Claimed
from p2p_dtfm.core.messages.work import Kind, Lack
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.testbed.lies.in_words import say_and_believe
from p2p_dtfm.testbed.lies.lie import Lie, put
from p2p_dtfm.testbed.lies.of_peers import WRONG, in_its_place, with_work

_FALSE = 2.0
"""How many times the right loss it states."""
Chosen = Callable[[str, Any, Any], list[str]]
"""Which members are told something else, by this peer, about what it says in the open step."""


def whisper_doubts(lie: Lie) -> None:
    """Tells some honest members, in each step others, that the work is false. They find that it is
    so, and say so in their Prepared, which the rest were not asked to look at."""

    def chosen(me: str, here: Any, said: Any) -> list[str]:
        honest = _honest(lie, me, here, said)
        count = max(1, round(lie.strength * len(honest)))
        turn = here.step % max(1, len(honest))
        return (honest[turn:] + honest[:turn])[:count]

    _lie_where_colluders_judge(lie)
    _tell_otherwise(lie, chosen, WRONG)


def whisper_that_it_could_not(lie: Lie) -> None:
    """Tells the member that would audit in its place that it could not. That member finds the lie,
    and nobody waits for its word."""

    def chosen(me: str, here: Any, said: Any) -> list[str]:
        return [it for it in (in_its_place(me, here, said),) if it and it not in lie.colluders]

    _lie_where_colluders_judge(lie)
    _tell_otherwise(lie, chosen, COULD_NOT)


def tell_all_but_one(lie: Lie) -> None:
    """Tells all but one member what its audits come to."""
    _tell_otherwise(lie, lambda me, here, said: _honest(lie, me, here, said)[:1], None)


def claim_to_all_but_one(lie: Lie) -> None:
    honest = Audits._say

    def say(self: Any, here: Any, said: Any) -> None:
        if not isinstance(said, Claimed) or not lie.is_told(here.step):
            honest(self, here, said)
            return
        me, holders = self._tools.me, here.plan.stage_holders()
        here.book.record(me, said)
        victim = min(set(holders) - {me, *lie.colluders})
        for peer_id in set(holders) - {victim}:
            self._tools.net.messenger.tell(peer_id, said)

    put(Audits, "_say", say)


def deny_an_audit(lie: Lie) -> None:
    _say_that_it_was_not_told(lie, Kind.AUDIT)


def deny_a_claim(lie: Lie) -> None:
    _say_that_it_was_not_told(lie, Kind.CLAIM)


def _say_that_it_was_not_told(lie: Lie, kind: Kind) -> None:
    """Says that an honest member has not told it something, and withholds its own Prepared for
    that."""
    honest = Audits.account

    async def account(self: Any, view: Any, plan: Any, step: int, *rest: Any) -> Any:
        made, me = await honest(self, view, plan, step, *rest), self._tools.me
        drawn = {by for each in self._book.rounds() for by in each.values()} if made else set()
        victims = sorted(drawn - {me, *lie.colluders})
        if not victims or not lie.is_told(step):
            return made
        while not self._state.is_over(view):
            self._waits_for = (Lack(victims[0], kind),)
            await self._state.wait()
        self._waits_for = ()
        return made

    put(Audits, "account", account)


def _honest(lie: Lie, me: str, here: Any, said: Any) -> list[str]:
    return sorted(set(here.plan.stage_holders()) - {me, said.peer_id, *lie.colluders})


def _liar_of(lie: Lie, plan: Any) -> str:
    """The colluder that lies in its work: the one that computes losses."""
    if len(lie.colluders) < 2:
        return ""
    ends = {it: plan.layers_of(it).stop for it in plan.stage_holders()}
    last = max(ends.values())
    return max((it for it in lie.colluders if ends.get(it) == last), default="")


def _colluders_judge(lie: Lie, book: Any, peer_id: str) -> bool:
    """Whether colluders are drawn for the work, and nobody else."""
    auditors = {by for drawn in book.rounds() for peer, by in drawn.items() if peer == peer_id}
    return bool(auditors) and auditors <= set(lie.colluders)


def _lie_where_colluders_judge(lie: Lie) -> None:
    honest, lied = Audits._claim, list[int]()

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said, me = await honest(self, here, local), self._tools.me
        lied.clear()
        if me != _liar_of(lie, here.plan):
            return said
        while set(here.book.not_claimed()) - {me}:
            if self._state.is_over(here.view):
                await self._state.until_over(here.view)
            await self._state.wait()
        claims = here.book._at(here.step).claims
        claims[me] = said
        is_safe = _colluders_judge(lie, here.book, me)
        del claims[me]
        here.book._draw = None
        if not is_safe or not lie.is_told(here.step):
            return said
        lied.append(here.step)
        self._next_opening = said.opening
        return await honest(self, here, dataclasses.replace(local, **changed(local)))

    def changed(local: Any) -> dict[str, Any]:
        return {"loss_sum": local.loss_sum * _FALSE}

    put(Audits, "_claim", claim)
    say_and_believe(lie, changed, lambda local: bool(lied))


def _tell_otherwise(lie: Lie, chosen: Chosen, work: bytes | None) -> None:
    """Tells the chosen members `work`, or nothing. If a colluder lies in its work, only audits of
    that work are told so."""
    honest = Audits._say

    def is_about(here: Any, said: Any) -> bool:
        if not isinstance(said, Audited):
            return False
        liar = _liar_of(lie, here.plan)
        if work is None or not liar:
            return said.peer_id not in lie.colluders
        return said.peer_id == liar and _colluders_judge(lie, here.book, liar)

    def say(self: Any, here: Any, said: Any) -> None:
        others = chosen(self._tools.me, here, said) if is_about(here, said) else []
        if not others or not lie.is_told(here.step):
            honest(self, here, said)
            return
        here.book.record(self._tools.me, said)
        other = None if work is None else with_work(self, said, work)
        for peer_id in here.plan.stage_holders():
            told = other if peer_id in others else said
            if told is not None:
                self._tools.net.messenger.tell(peer_id, told)

    put(Audits, "_say", say)


WHISPERS = {
    "whispered-doubt": whisper_doubts,
    "whispered-refusal": whisper_that_it_could_not,
    "audits-untold": tell_all_but_one,
    "audits-denied": deny_an_audit,
    "claims-untold": claim_to_all_but_one,
    "claims-denied": deny_a_claim,
}
