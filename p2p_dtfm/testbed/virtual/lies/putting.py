"""Puts lies in the place of the daemon's functions, for as long as a seed is played.

The kinds are those of real daemons (`testbed.lies`). Each is put in once for each liar that tells
it. Other peers' turns in the same interpreter never reach a liar's functions.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from p2p_dtfm.testbed.lies import (
    evasions,
    in_sums,
    in_words,
    in_work,
    late_claims,
    of_peers,
    whispers,
)
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.kinds import KINDS as KINDS_OF_DAEMONS
from p2p_dtfm.testbed.virtual.lies import notes, words
from p2p_dtfm.testbed.virtual.lies.lying import (
    AFTER_TRAINING,
    HERE_ALONE,
    IN_STAGES,
    IN_WORK,
    WHILE_NOT_DRAWN,
    Lying,
)
from p2p_dtfm.testbed.virtual.patches import Patches

STRENGTHS = {"speed": 20.0}
"""Strengths that differ from those of real daemons."""
_WITH_PUT = (in_work, evasions, late_claims, in_sums, in_words, of_peers, whispers)


class LieInTurn:
    """A `testbed.lies.lie.Lie` that is told only in its liar's turns, and while the liar tells its
    kind."""

    def __init__(self, lying: Lying, name: str, kind: str) -> None:
        self.kind = kind
        default = KINDS_OF_DAEMONS[kind].strength if kind in KINDS_OF_DAEMONS else None
        self.strength = STRENGTHS.get(kind, default or 1.0)
        self.colluders = tuple(sorted(lying.ids.values())) if lying.together else ()
        self._lying = lying
        self._name = name

    def is_told(self, step: int) -> bool:
        lying = self._lying
        is_its_turn = lying.here() == self._name and lying.kind() == self.kind
        ends = lying.steps + (self.kind in AFTER_TRAINING)
        if not is_its_turn or step >= ends:
            return False
        view = lying.views.get(self._name)
        if self.kind in IN_WORK + IN_STAGES + WHILE_NOT_DRAWN and view is not None:
            lying.tell_work(view, step)
        else:
            lying.tell()
        return True


class LieOfOthers(LieInTurn):
    """A lie about the works that the liar audits. It spares the colluders, whatever kind is told
    now."""

    def __init__(self, lying: Lying, name: str) -> None:
        super().__init__(lying, name, "accuse")

    def is_told(self, step: int) -> bool:
        self.kind = "accuse" if self._lying.kind() == "accuse" else ""
        if self.kind:
            self._lying.tell()
        return True


@contextmanager
def put_in(lying: Lying, pairs: Sequence[tuple[str, str]] = ()) -> Iterator[None]:
    """Puts in all functions that lies need; each is honest where nobody lies. `pairs` are names and
    kinds that they will tell later, besides their kinds now."""
    patches = Patches()
    try:
        for note in (*notes.NOTES, *words.LIES):
            note(patches, lying)
        for name in sorted(lying.ids):
            kinds = {kind for who, kind in (*pairs, *lying.kinds.items()) if who == name}
            for kind in sorted(kinds - HERE_ALONE):
                if kind in INSTALLED:
                    with _put_for(patches, lying, name):
                        INSTALLED[kind](LieInTurn(lying, name, kind))  # type: ignore[arg-type]
            with _put_for(patches, lying, name):
                of_peers.find_what_suits(LieOfOthers(lying, name))  # type: ignore[arg-type]
        yield
    finally:
        patches.undo()


@contextmanager
def _put_for(patches: Patches, lying: Lying, name: str) -> Iterator[None]:
    """What the kinds of real daemons put in meanwhile takes effect in this peer's process alone."""

    def put(owner: Any, attribute: str, made: Any) -> None:
        before = owner.__dict__[attribute]

        @functools.wraps(before)
        def asked(*arguments: Any, **named: Any) -> Any:
            whose = made if lying.here() == name else before
            return whose(*arguments, **named)

        patches.put(owner, attribute, asked)

    kept = [(module, module.put) for module in _WITH_PUT]
    try:
        for module in _WITH_PUT:
            module.put = put  # type: ignore[attr-defined]
        yield
    finally:
        for module, before in kept:
            module.put = before  # type: ignore[attr-defined]
