"""Whom a daemon says it waits for, and where it says its tasks wait."""

from collections.abc import Callable, Iterator

from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.daemon.dashboard.waits import LOOKS_EVERY_S, TOLD_FROM_S, TOLD_LIMIT, owner_and_place
from p2p_dtfm.daemon.telemetry.names import PEER_ID
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.seeds.told.world import Falsehood, Truth, Word, names_in
from p2p_dtfm.testbed.virtual.turns import VirtualTask

SAID_S = 8.0
"""A word that was said has arrived by then. Some words are 2.4 s late, lanes 1.5 s, and a word may
have been said again since."""
GONE_S = 30.0
"""A dead peer is known to be gone by then. Silence is told after five seconds, and agreed on in
some ten, for which one attempt may have failed."""
NO_STEP_S = 4.0
"""The daemon's own way out of a step takes no longer."""
ASKED_S = 15.0
"""A daemon that asks a peer that is gone hears nothing for ten seconds."""


def whom(word: Word, world: Truth) -> Iterator[Falsehood]:
    """Peers that are named though nobody waits for them."""
    yield from _of_the_step(word, world)
    yield from _of_the_agreement(word, world)
    if "asks" in word.reason:
        for peer_id in PEER_ID.findall(word.reason):
            yield from _none_of_the_dead(word, world, peer_id, ASKED_S, word.reason)


def _of_the_step(word: Word, world: Truth) -> Iterator[Falsehood]:
    """Members whose Prepared, or claim, is missing. Where no step is under way nobody's is."""
    if word.status.get("waits_for") and (word.is_stopped or word.plan is None):
        who = names_in(world, word.status["waits_for"])
        yield Falsehood("no step", f"waits for {who}, and no step is under way", NO_STEP_S)
    for peer_id in word.status.get("waits_for") or ():
        yield from _none_of_the_dead(word, world, peer_id, GONE_S, "waits_for")
        if _has_prepared(word, world, peer_id):
            what = f"waits for {world.name(peer_id)}, which has prepared that step"
            yield Falsehood(f"waits for {peer_id}", what, SAID_S)


def _has_prepared(word: Word, world: Truth, peer_id: str) -> bool:
    """The other has said all that is due in the step that this daemon is at, and could be heard."""
    other, mine = world.participant_of(peer_id), word.trainer
    if other is None or mine is None or not world.is_clear(peer_id, word.me):
        return False
    here, there = mine.ledger, other.trainer._state.ledger
    if here is None or there is None or here.view != there.view:
        return False
    return there.step > here.step or (there.step == here.step and peer_id not in there.missing)


def _of_the_agreement(word: Word, world: Truth) -> Iterator[Falsehood]:
    told = word.status.get("agreement")
    if told is None or not (named := PEER_ID.findall(told["reason"])):
        return
    for peer_id in named:
        yield from _none_of_the_dead(word, world, peer_id, GONE_S, told["reason"])
        for beginning, has_said in _SAYS.items():
            if not told["reason"].startswith(beginning) or peer_id == word.me:
                continue
            if (other := world.participant_of(peer_id)) is None:
                continue
            if not world.is_clear(peer_id, word.me):
                continue
            if has_said(word, peer_id, other.membership.agreement._state):
                what = f"{beginning} {world.name(peer_id)}, which has said so"
                yield Falsehood(f"{beginning} {peer_id}", what, SAID_S)


def _is_active(word: Word, peer_id: str, other: AgreementState) -> bool:
    mine = word.view
    return mine is not None and other.view is not None and other.view.id == mine.id


def _is_synced(word: Word, peer_id: str, other: AgreementState) -> bool:
    mine = word.agreement.next_view if word.agreement is not None else None
    if mine is None or other.next_view is None or other.next_view.id != mine.id:
        return False
    return any(it.peer_id == peer_id for it in other.agreed.synced)


def _has_contributed(word: Word, peer_id: str, other: AgreementState) -> bool:
    mine = word.agreement.attempt if word.agreement is not None else None
    theirs = other.attempt
    if mine is None or theirs is None or (mine.number, mine.base) != (theirs.number, theirs.base):
        return False
    return theirs.me in theirs.opened and theirs.me not in mine.opened


def _is_ready(word: Word, peer_id: str, other: AgreementState) -> bool:
    mine = word.agreement.attempt if word.agreement is not None else None
    theirs = other.attempt
    if mine is None or theirs is None or mine.snapshot is None:
        return False
    return theirs.snapshot == mine.snapshot and theirs.me in theirs.ready


_SAYS: dict[str, Callable[[Word, str, AgreementState], bool]] = {
    "waits for Active from": _is_active,
    "waits for the states of": _is_synced,
    "waits for what": _has_contributed,
    "waits for Ready from": _is_ready,
}
"""Whether a peer has said what is waited for, by how the reason begins."""


def _none_of_the_dead(
    word: Word, world: Truth, peer_id: str, bound_s: float, where: str
) -> Iterator[Falsehood]:
    if peer_id == word.me and where == "waits_for" and not _owes_itself(word):
        yield Falsehood("itself", f"says in {where} that it waits for itself", SAID_S)
    if world.gone_for_s(peer_id) > bound_s:
        what = f"names {world.name(peer_id)} in {where}, which is gone"
        yield Falsehood(f"{where[:20]} {peer_id}", what, 0.0)


def _owes_itself(word: Word) -> bool:
    """It has not prepared the step itself."""
    ledger = word.trainer.ledger if word.trainer is not None else None
    return ledger is None or word.me in ledger.missing


class TrueWaits:
    """How long each daemon's tasks have really been at one await, looked at each second."""

    def __init__(self) -> None:
        self._since: dict[VirtualTask, tuple[object, float]] = {}
        self._waited: dict[Process, dict[tuple[str, str], list[float]]] = {}

    def look(self, tasks: list[VirtualTask], now_s: float, awake: dict[str, float]) -> None:
        """`awake` says since when each process takes turns, by name: while a process stands still
        its tasks do not wait."""
        seen: dict[VirtualTask, tuple[object, float]] = {}
        self._waited = {}
        for task in tasks:
            future = getattr(task, "_fut_waiter", None)
            if task.process is None or future is None or isinstance(future, VirtualTask):
                continue
            before = self._since.get(task)
            since_s = before[1] if before is not None and before[0] is future else now_s
            seen[task] = (future, since_s)
            awake_s = awake.get(task.process.name)
            if awake_s is None or not (place := owner_and_place(task))[1]:
                continue
            waited = self._waited.setdefault(task.process, {}).setdefault(place, [])
            waited.append(now_s - max(since_s, awake_s))
        self._since = seen

    def of(self, process: Process | None) -> dict[tuple[str, str], list[float]]:
        """The least that each task has waited, by owner and place."""
        return self._waited.get(process, {}) if process is not None else {}


LOOK_S = 1.0
"""A wait may be seen so much later than it began."""


def waits(word: Word, true: TrueWaits) -> Iterator[Falsehood]:
    """Each wait that is told exists, and each wait that lasts is told."""
    standing = true.of(word.peer.process)
    told = {(it["owner"], it["place"]): it for it in word.status["waits"]}
    for place, it in told.items():
        if place not in standing:
            yield Falsehood(f"nobody at {place}", f"tells of a wait that is none: {it}", 0.0)
    if len(told) == TOLD_LIMIT:
        return
    for place, waited in standing.items():
        if max(waited) > TOLD_FROM_S + LOOKS_EVERY_S + LOOK_S and place not in told:
            what = f"tells nothing of a wait of {max(waited):.0f} s: {place}"
            yield Falsehood(f"untold {place}", what, 0.0)
        elif place in told and told[place]["waited_s"] < max(waited) - LOOKS_EVERY_S - LOOK_S:
            what = f"tells of {told[place]['waited_s']} s, not {max(waited):.0f} s: {place}"
            yield Falsehood(f"shorter {place}", what, 0.0)
