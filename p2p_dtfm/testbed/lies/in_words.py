"""Lies in what a liar states of its step: in its claim, and in its signed Prepared."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from p2p_dtfm.core.audit.claim_book import commitment_to
from p2p_dtfm.core.audit.work import OPENING_BYTES, signed_claim
from p2p_dtfm.core.commit import judgement
from p2p_dtfm.core.commit import step as transaction
from p2p_dtfm.core.messages.audit_messages import Claimed
from p2p_dtfm.core.messages.prepared import Prepared, SignedPrepared, sign_prepared
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.daemon.node.participation import participant
from p2p_dtfm.daemon.trainer import step_loop
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.testbed.lies.in_work import change_gradients
from p2p_dtfm.testbed.lies.kinds import CONFESSES_AFTER
from p2p_dtfm.testbed.lies.lie import Lie, put

_DIGEST = bytes(16)


def _state(lie: Lie, changed: Callable[[Prepared], dict[str, Any]]) -> None:
    """Changes what it states in its signed Prepared, alike for all members."""

    def sign(prepared: Prepared, signer: Any) -> Any:
        if lie.is_told(prepared.step):
            prepared = msgspec.structs.replace(prepared, **changed(prepared))
        return sign_prepared(prepared, signer)

    put(step_loop, "sign_prepared", sign)


def state_another_norm(lie: Lie) -> None:
    def changed(prepared: Prepared) -> dict[str, Any]:
        factor = 1.0 + lie.strength
        return {"squared_norms": {n: it * factor for n, it in prepared.squared_norms.items()}}

    _state(lie, changed)


def say_and_believe(
    lie: Lie,
    changed: Callable[[Any], dict[str, Any]],
    is_there: Callable[[Any], bool] = lambda local: True,
) -> None:
    """Changes what it says it has computed itself. It reckons with that in its own lineage as well:
    otherwise its next step would give the lie away. `is_there` says whether there is something to
    lie about."""
    honest, mine = step_loop.StepLoop._say_prepared, list[str]()

    def say_prepared(self: Any, view: Any, step: int, local: Any, *rest: Any) -> None:
        if is_there(local) and lie.is_told(step):
            local = dataclasses.replace(local, **changed(local))
        mine[:] = [self._tools.me]
        honest(self, view, step, local, *rest)

    def fault_of(prepared: Prepared, *rest: Any) -> str:
        return "" if prepared.peer_id in mine else judgement.fault_of(prepared, *rest)

    put(step_loop.StepLoop, "_say_prepared", say_prepared)
    put(transaction, "fault_of", fault_of)


def _claim_and_say(lie: Lie, name: str) -> None:
    """Lies in its claim as well: else it would be out, as it states what it has not claimed. Only
    the holder of a last layer has a value that is not nought."""
    factor, honest = 1.0 + lie.strength, Audits._claim

    def is_there(local: Any) -> bool:
        return bool(getattr(local, name))

    def changed(local: Any) -> dict[str, Any]:
        return {name: getattr(local, name) * factor}

    async def claim(self: Any, here: Any, local: Any) -> Any:
        if is_there(local) and lie.is_told(here.step):
            local = dataclasses.replace(local, **changed(local))
        return await honest(self, here, local)

    put(Audits, "_claim", claim)
    say_and_believe(lie, changed, is_there)


def state_another_loss(lie: Lie) -> None:
    _claim_and_say(lie, "loss_sum")


def state_another_held_out_loss(lie: Lie) -> None:
    _claim_and_say(lie, "held_out_loss_sum")


def count_twice(lie: Lie) -> None:
    _state(lie, lambda prepared: {"token_count": 2 * prepared.token_count})


def state_other_states(lie: Lie) -> None:
    _state(lie, lambda prepared: {"states": dict.fromkeys(prepared.states, _DIGEST)})


def state_another_lineage(lie: Lie) -> None:
    _state(lie, lambda prepared: {"base": "0" * len(prepared.base)})


def tell_each_another_norm(lie: Lie) -> None:
    _prove_oneself_a_liar(lie.is_told)


def _prove_oneself_a_liar(at: Callable[[int], bool]) -> None:
    """Says two Prepared of one step, each signed."""
    honest = participant.Participant.say_prepared

    def say_prepared(self: Any, signed: Any, view: Any) -> None:
        prepared = decode(signed.payload, Prepared)
        if not at(prepared.step):
            honest(self, signed, view)
            return
        for number, peer_id in enumerate(sorted(view.member_ids)):
            norms = {n: it * (1 + number) for n, it in prepared.squared_norms.items()}
            other = msgspec.structs.replace(prepared, squared_norms=norms)
            said = sign_prepared(other, self.membership.sign)
            self.network.messenger.tell(peer_id, SignedPrepared(said))

    put(participant.Participant, "say_prepared", say_prepared)


def be_ready_for_all_but_one(lie: Lie) -> None:
    be_ready_for(lie, lambda honest: honest[1:])


def be_ready_for(lie: Lie, chosen: Callable[[Sequence[str]], Sequence[str]]) -> None:
    """Says that it is ready for the next view to its colluders and the `chosen` of the other
    members, and to the rest that it is not. So some take that view over, and others do not."""
    honest = participant.Participant.say_prepared

    def say_prepared(self: Any, signed: Any, view: Any) -> None:
        prepared = decode(signed.payload, Prepared)
        if prepared.ready_for is None or not lie.is_told(prepared.step):
            honest(self, signed, view)
            return
        other = msgspec.structs.replace(prepared, ready_for=None)
        other_signed = sign_prepared(other, self.membership.sign)
        lies_with = {signed.peer_id, *lie.colluders}
        others = sorted(set(view.member_ids) - lies_with)
        told = {*lies_with, *chosen(others)}
        for peer_id in sorted(view.member_ids):
            said = SignedPrepared(signed if peer_id in told else other_signed)
            self.network.messenger.tell(peer_id, said)

    put(participant.Participant, "say_prepared", say_prepared)


def confess_late(lie: Lie) -> None:
    change_gradients(lie)
    _prove_oneself_a_liar(lambda step: step >= lie.from_step + CONFESSES_AFTER)


def _claim_otherwise(lie: Lie, changed: Callable[[Claimed], dict[str, Any]]) -> None:
    honest = Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Claimed:
        said = await honest(self, here, local)
        return msgspec.structs.replace(said, **changed(said)) if lie.is_told(here.step) else said

    put(Audits, "_claim", claim)


def claim_late(lie: Lie) -> None:
    honest = Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Claimed:
        said = await honest(self, here, local)
        if lie.is_told(here.step):
            await asyncio.sleep(lie.strength)
        return said

    put(Audits, "_claim", claim)


def open_another_thing(lie: Lie) -> None:
    _claim_otherwise(lie, lambda said: {"opening": bytes(len(said.opening))})


def compute_like_nobody(lie: Lie) -> None:
    """Claims an arithmetic of its own, so that nobody can compute its work again."""

    def changed(said: Claimed) -> dict[str, Any]:
        return {"share": msgspec.structs.replace(said.share, arithmetic="cpu-of-its-own")}

    _claim_otherwise(lie, changed)
    change_gradients(lie)


def claim_one_thing_to_some(lie: Lie) -> None:
    """Claims one thing to some holders, and another to the rest. In its Prepared it keeps to what
    it told the first ones."""
    _claim_two_things(lie, lambda audits, here, said: {"work": said.work[::-1]})


def open_one_thing_to_some(lie: Lie) -> None:
    """Claims the same to all, but they draw unlike auditors, and wait for one another. If it has
    not yet committed itself to an opening, that happens now, else in the next step."""

    def changed(audits: Any, here: Any, said: Claimed) -> dict[str, Any]:
        other = {"commitment": commitment_to(bytes([1]) * OPENING_BYTES)}
        if here.book.has_committed(audits._tools.me):
            return other
        return other | {"opening": bytes([1 + here.step % 255]) * OPENING_BYTES}

    _claim_two_things(lie, changed)


def _claim_two_things(lie: Lie, changed: Callable[[Any, Any, Claimed], dict[str, Any]]) -> None:
    honest = Audits._say

    def say(self: Any, here: Any, said: Any) -> None:
        if not isinstance(said, Claimed) or not lie.is_told(here.step):
            honest(self, here, said)
            return
        here.book.record(self._tools.me, said)
        other = msgspec.structs.replace(said, **changed(self, here, said))
        other = signed_claim(other, self._tools.me, self._tools.net.sign)
        for place, peer_id in enumerate(sorted(here.plan.stage_holders())):
            self._tools.net.messenger.tell(peer_id, other if place % 2 else said)

    put(Audits, "_say", say)


def withhold_prepared(lie: Lie) -> None:
    """Flips gradients, and says no Prepared once an auditor has found that. Then nothing it says
    proves them."""
    honest = Audits.account

    async def account(self: Any, view: Any, plan: Any, step: int, *rest: Any) -> Any:
        made = await honest(self, view, plan, step, *rest)
        if made is not None and lie.is_told(step):
            while self._tools.me in made.disputed and not self._state.is_over(view):
                await self._state.wait()
        return made

    put(Audits, "account", account)
    change_gradients(lie)


def hear_otherwise(lie: Lie) -> None:
    """States another claim of one member than that member made, with a signature of something
    else."""
    honest = Audits.account

    async def account(self: Any, view: Any, plan: Any, step: int, *rest: Any) -> Any:
        made, me = await honest(self, view, plan, step, *rest), self._tools.me
        if made is None or not lie.is_told(step):
            return made
        whom = min(peer_id for peer_id in made.heard if peer_id not in (me, *lie.colluders))
        other = made.heard[whom]._replace(claim=_DIGEST)
        return msgspec.structs.replace(made, heard=made.heard | {whom: other})

    put(Audits, "account", account)


IN_WORDS = {
    "norm": state_another_norm,
    "unlike-norms": tell_each_another_norm,
    "unlike-vouches": be_ready_for_all_but_one,
    "loss": state_another_loss,
    "held-out": state_another_held_out_loss,
    "count": count_twice,
    "digest": state_other_states,
    "lineage": state_another_lineage,
    "opening": open_another_thing,
    "alien": compute_like_nobody,
    "false-witness": hear_otherwise,
    "two-faced": claim_one_thing_to_some,
    "unlike-openings": open_one_thing_to_some,
    "mute": withhold_prepared,
    "drip": claim_late,
    "confess": confess_late,
}
