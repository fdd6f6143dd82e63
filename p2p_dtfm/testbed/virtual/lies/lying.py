"""Who lies in a seed, and in what; and what the honest committed meanwhile.

The daemons know nothing of it. While a seed is played, lies are in the place of functions of the
daemon (`putting.put_in`). They ask at each turn whose turn it is, so that honest daemons in the
same interpreter stay as they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.ports import now
from p2p_dtfm.testbed.virtual.process import PROCESS

IN_WORK = ("zeros", "flip", "noise", "replay", "skipped", "tokens", "sum", "loss", "scale", "bend")
"""Lies in a stage-holder's own work. Only a peer that computes the work again finds them. A lie
stays where nobody, or a colluder, is drawn to audit it."""
IN_STAGES = ("activation", "overflow")
"""Likewise, in pipelines alone."""
WHILE_NOT_DRAWN = (
    *("evade", "evade-early", "chosen-draw", "late-loss", "told-loss"),
    *("late-part", "late-split", "late-opening", "late-alien", "evade-sum", "late-sum"),
)
"""Likewise, until the liar is drawn for the first time."""
IN_WORDS = (
    "sum to some",
    "norm",
    "state",
    "accuse",
    "accuses unasked",
    "claims withheld",
    "frames withheld",
    "unshown",
    "speed",
    "slander",
    "count",
    "lineage",
    "opening",
    "part",
    "nan",
)
"""Lies that others see without an audit, or that change no state: nothing of them may stay."""
HERE_ALONE = frozenset(
    {"sum to some", "state", "accuses unasked", "claims withheld", "frames withheld"}
)
"""Not among the lies of real daemons (`testbed.lies`), as several peers have to lie alike."""
KINDS = IN_WORK[:8] + IN_WORDS[:10] + IN_WORK[8:] + IN_WORDS[10:]
AFTER_TRAINING = frozenset({"held-out", "held-out-sent"})
"""Also told in the evaluation after the last step. No seed draws these or `IN_STAGES`."""
SELDOM_TOLD = frozenset({"accuse", "accuses unasked", "state", "unshown", "slander"})
"""Told only to peers that ask, or by peers that are asked."""


@dataclass(frozen=True)
class Deed:
    """A step of a view in which somebody lied, or which somebody committed."""

    view: ViewId
    step: int


@dataclass
class Denied:
    """What honest peers find of one liar's work of a step."""

    holders: int
    """How many members have a stage."""
    by: set[str] = field(default_factory=set)
    """Honest peers that computed something else, and said so in their Prepared."""
    most_at_s: float | None = None
    """Since when `by` is more than half of the holders, by the world's time."""


@dataclass
class CommittedStep:
    """One step of one view, as honest members have seen it."""

    digests: dict[str, str] = field(default_factory=dict)
    """The outcome's digest, by peer."""
    drawn: dict[str, str] = field(default_factory=dict)
    """Who was drawn to compute a work again, by the peer whose work it is."""
    judges: dict[str, int] = field(default_factory=dict)
    """How many honest peers can compute a liar's work again, by liar."""


class Lying:
    """The liars of one seed. `ids` are the peer ids, by name, of all that ever lie."""

    def __init__(self, ids: dict[str, str], together: bool) -> None:
        self.ids = ids
        self.names = {peer_id: name for name, peer_id in ids.items()}
        self.together = together
        """They lie as one: each finds the others' work right, and says so."""
        self.kinds: dict[str, str] = {}
        """How each liar lies now, by its name."""
        self.told: dict[Deed, dict[str, str]] = {}
        """How peers have lied in their work, by step and peer id."""
        self.committed: dict[Deed, CommittedStep] = {}
        self.denied: dict[tuple[Deed, str], Denied] = {}
        """Denials, by step and the liar's peer id."""
        self.reports: list[str] = []
        """What honest peers report: whom they leave out of a view, and why."""
        self.count = 0
        """How many lies of whatever kind were told."""
        self.has_told: set[tuple[str, str]] = set()
        """Who has told a lie, and of which kind."""
        self.views: dict[str, ViewId] = {}
        """The view in which each liar takes its step."""
        self.steps = 1 << 62
        """How many steps train."""
        self.states: dict[bytes, bytes] = {}
        """Digests of states that were given, by the digests that they should have."""

    # who is asked ------------------------------------------------------------------------------

    def here(self) -> str:
        """The name of the peer whose turn it is; empty for the world's."""
        process = PROCESS.get()
        return process.peer_name if process is not None else ""

    def kind(self) -> str:
        """How the peer whose turn it is lies; empty: it does not."""
        return self.kinds.get(self.here(), "")

    def victims(self, peer_ids: Any) -> list[str]:
        """The honest ones among these, in order: all colluders choose the same."""
        return sorted(peer_id for peer_id in peer_ids if peer_id not in self.names)

    # what was done -----------------------------------------------------------------------------

    def tell(self) -> None:
        """Counts a lie that changes no work."""
        self.count += 1
        self.has_told.add((self.here(), self.kind()))

    def tell_work(self, view: ViewId, step: int) -> None:
        self.tell()
        self.told.setdefault(Deed(view, step), {})[self.ids[self.here()]] = self.kind()

    def commit(self, deed: Deed, digest: str) -> CommittedStep | None:
        """Notes a commit of the peer whose turn it is, if that peer is honest."""
        if self.here() in self.ids:
            return None
        seen = self.committed.setdefault(deed, CommittedStep())
        seen.digests[self.here()] = digest
        return seen

    def deny(self, deed: Deed, holders: int, peer_ids: Iterable[str]) -> None:
        """Notes the denials of the peer whose turn it is, if that peer is honest."""
        for peer_id in peer_ids if self.here() not in self.ids else ():
            denied = self.denied.setdefault((deed, peer_id), Denied(holders))
            denied.by.add(self.here())
            if denied.most_at_s is None and 2 * len(denied.by) > holders:
                denied.most_at_s = now.monotonic_s()

    def found_out(self) -> dict[str, float]:
        """Peer ids of liars whose work is denied by honest peers that are more than half of all
        stage-holders, and since when."""
        found: dict[str, float] = {}
        for (_, liar), it in self.denied.items():
            if it.most_at_s is not None:
                found[liar] = min(found.get(liar, it.most_at_s), it.most_at_s)
        return found

    def stayed(self) -> list[int]:
        """Steps that honest peers have committed, and in which somebody had lied in its work."""
        return sorted({deed.step for deed in self.committed if self.told.get(deed)})
