"""Lies of peers that claim last, so that they know whether they are drawn, and claim
accordingly."""

import dataclasses
from typing import Any, NamedTuple

import msgspec

from p2p_dtfm.core.audit.work import OPENING_BYTES
from p2p_dtfm.daemon.step.reduction.segment_exchange import sum_digest
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.testbed.lies.evasions import (
    TRIED,
    _drawn_by,
    _flip_where,
    _have_all_agree_anew,
    _known_where,
    _stop_where_drawn,
    _until_others_have_claimed,
)
from p2p_dtfm.testbed.lies.in_sums import change_sums, turn_parts_round
from p2p_dtfm.testbed.lies.lie import Lie, put
from p2p_dtfm.train.stage.replay.work import bytes_of, chunk_digest


async def _knows_that_it_is_drawn(audits: Any, here: Any, said: Any, lie: Lie) -> bool:
    """Whether this peer is drawn. Of colluders the last one waits for all others' claims; the rest
    never know."""
    me = audits._tools.me
    if me != max(lie.colluders, default=me):
        return False
    await _until_others_have_claimed(audits, here)
    return me in _drawn_by(here.book, me, said)


def _stop_once_audited(liar: Any, drawn: set[int]) -> None:
    """Has all agree anew in the steps of `drawn`, before this peer has said a Prepared."""
    honest = Audits._audited

    async def audited(self: Any, here: Any) -> Any:
        found = await honest(self, here)
        if liar.lies and here.step in drawn:
            await _have_all_agree_anew(self, here.view)
        return found

    put(Audits, "_audited", audited)


class _TurnedRound(NamedTuple):
    """A segment's parts, all turned round but those that the liar sums itself."""

    cut: Any
    owners: tuple[str, ...]
    me: str

    def part(self, chunk: int) -> Any:
        part = self.cut.part(chunk)
        return part if self.owners[chunk] == self.me else -part

    def payload(self, chunk: int) -> bytes:
        return bytes_of(self.part(chunk))


def _with_turned_parts(audits: Any, here: Any) -> Any:
    """The step with turned parts, to be claimed, and to be shown to auditors of what others made of
    them."""
    wire, cuts, parts = here.engine.mailbox.wire, {}, dict(here.mine.parts)
    for number, cut in here.mine.cut.items():
        owners = wire.chunks[here.plan.segments()[number].first_layer].owners
        cuts[number] = turned = _TurnedRound(cut, owners, audits._tools.me)
        parts[number] = tuple(chunk_digest(turned.payload(it)) for it in range(len(owners)))
    mine = dataclasses.replace(here.mine, parts=parts, cut=cuts)
    return dataclasses.replace(here, mine=mine)


def claim_what_was_due_if_drawn(lie: Lie) -> None:
    """Turns round all parts that it sends. Where it is drawn it claims the right work, so that
    nobody finds fault with that, and has all agree anew once it is audited."""
    _claim_otherwise_if_drawn(lie, is_split=False)


def claim_two_things_in_one_if_drawn(lie: Lie) -> None:
    """Turns round all parts that it sends, and claims these. Where it is drawn it claims the right
    work beside them. Its audit then finds that work, and the holders find the parts that they
    got."""
    _claim_otherwise_if_drawn(lie, is_split=True)


def _claim_otherwise_if_drawn(lie: Lie, *, is_split: bool) -> None:
    liar, honest = _known_where(lie, in_first=False), Audits._claim
    drawn = set[int]()

    async def claim(self: Any, here: Any, local: Any) -> Any:
        right = await honest(self, here, local)
        if not liar.lies:
            return right
        is_drawn = await _knows_that_it_is_drawn(self, here, right, lie)
        if is_drawn:
            drawn.add(here.step)
        if is_drawn and not is_split:
            return right
        self._next_opening = right.opening  # the same opening once more
        turned = _with_turned_parts(self, here)
        false = await honest(self, turned, local)
        if not is_drawn:
            return false
        self._mine = turned.mine
        object.__setattr__(here, "mine", turned.mine)  # it audits others' sums by what it has sent
        return msgspec.structs.replace(false, work=right.work)

    turn_parts_round(lambda step: liar.lies)
    put(Audits, "_claim", claim)
    _stop_once_audited(liar, drawn)


def open_what_draws_nobody(lie: Lie) -> None:
    """Opens something else than it was committed to, if a colluder or itself is drawn. Then nothing
    is audited, and a wrong opening by itself bars nobody."""
    liar, honest = _flip_where(lie, in_first=False), Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said, me = await honest(self, here, local), self._tools.me
        if not liar.lies or me != max(lie.colluders, default=me):
            return said
        await _until_others_have_claimed(self, here)
        colluders = {me, *lie.colluders}
        for number in range(TRIED):
            if colluders.isdisjoint(_drawn_by(here.book, me, said)):
                break
            said = msgspec.structs.replace(said, opening=number.to_bytes(OPENING_BYTES))
        return said

    put(Audits, "_claim", claim)


def compute_like_nobody_if_drawn(lie: Lie) -> None:
    """Where it is drawn, it claims an arithmetic of its own: so nobody is drawn for it."""
    liar, honest = _flip_where(lie, in_first=False), Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said = await honest(self, here, local)
        if not liar.lies or not await _knows_that_it_is_drawn(self, here, said, lie):
            return said
        share = msgspec.structs.replace(said.share, arithmetic="cpu-of-its-own")
        return msgspec.structs.replace(said, share=share)

    put(Audits, "_claim", claim)


def make_other_sums_until_drawn(lie: Lie) -> None:
    """Makes other sums. Where it is drawn it has all agree anew, before anybody has computed its
    work again."""
    liar = _known_where(lie, in_first=False)
    change_sums(lambda step: liar.lies, lie.strength)
    _stop_where_drawn(lie, liar)


def claim_the_right_sums_if_drawn(lie: Lie) -> None:
    """Claims the right sums where it is drawn, though it has sent others. Its work is found right,
    and then it has all agree anew."""
    liar, honest = _known_where(lie, in_first=False), Audits._claim
    right, drawn = change_sums(lambda step: liar.lies, lie.strength), set[int]()

    def rightly(audits: Any, here: Any, local: Any) -> Any:
        me, wire, sums = audits._tools.me, here.engine.mailbox.wire, dict(local.sums)
        for number, digests in local.sums.items():
            segment, made = here.plan.segments()[number], list(digests)
            owners = wire.chunks[segment.first_layer].owners
            mine = [right[segment.first_layer, n] for n, it in enumerate(owners) if it == me]
            made[segment.holders.index(me)] = sum_digest(b"".join(mine))
            sums[number] = tuple(made)
        return dataclasses.replace(local, sums=sums)

    async def claim(self: Any, here: Any, local: Any) -> Any:
        false = await honest(self, here, local)
        if not liar.lies or not await _knows_that_it_is_drawn(self, here, false, lie):
            return false
        drawn.add(here.step)
        self._next_opening = false.opening  # the same opening once more
        return await honest(self, here, rightly(self, here, local))

    put(Audits, "_claim", claim)
    _stop_once_audited(liar, drawn)


LATE_CLAIMS = {
    "evade-sum": make_other_sums_until_drawn,
    "late-sum": claim_the_right_sums_if_drawn,
    "late-part": claim_what_was_due_if_drawn,
    "late-split": claim_two_things_in_one_if_drawn,
    "late-opening": open_what_draws_nobody,
    "late-alien": compute_like_nobody_if_drawn,
}
