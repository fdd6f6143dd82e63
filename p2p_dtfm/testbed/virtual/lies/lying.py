"""Who lies in a seed, and in what; and what the honest committed meanwhile.

Nothing of it is known to the daemons. Lies are put in place of functions of the daemon's
(`putting.put_in`) for as long as the seed is played, and ask at each turn whose it is: so the
honest ones in the same interpreter stay what they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.ports import now
from p2p_dtfm.testbed.virtual.process import PROCESS

IN_WORK = ("zeros", "flip", "noise", "replay", "skipped", "tokens", "sum", "loss", "scale", "bend")
"""Of a stage-holder's own work: only who computes it again finds it, and where it is not drawn, or
a colluder is, it stays."""
IN_STAGES = ("activation", "overflow")
"""Likewise, in pipelines alone."""
WHILE_NOT_DRAWN = (
    *("evade", "evade-early", "chosen-draw", "late-loss", "told-loss"),
    *("late-part", "late-split", "late-opening", "late-alien", "evade-sum", "late-sum"),
)
"""Likewise, until who does it is drawn for the first time."""
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
"""What others see without an audit, or what changes no state: nothing of it may stay."""
HERE_ALONE = frozenset(
    {"sum to some", "state", "accuses unasked", "claims withheld", "frames withheld"}
)
"""Not among those of real daemons (`testbed.lies`), as several have to lie alike."""
KINDS = IN_WORK[:8] + IN_WORDS[:10] + IN_WORK[8:] + IN_WORDS[10:]
AFTER_TRAINING = frozenset({"held-out", "held-out-sent"})
"""Told of the evaluation after the last step as well. Of these and of those in pipelines no seed
draws any."""
SELDOM_TOLD = frozenset({"accuse", "accuses unasked", "state", "unshown", "slander"})
"""Only to who asks, or by who is asked."""


@dataclass(frozen=True)
class Deed:
    """A step of a view, in which somebody lied, or which somebody committed."""

    view: ViewId
    step: int


@dataclass
class Denied:
    """One liar's work of a step."""

    holders: int
    """How many have a stage."""
    by: set[str] = field(default_factory=set)
    """The honest ones that came to something else, and said so in their Prepared."""
    most_at_s: float | None = None
    """Since when they are more than half of the holders, by the world's time."""


@dataclass
class CommittedStep:
    """As honest members have seen one step of one view."""

    digests: dict[str, str] = field(default_factory=dict)
    """Of the outcome, by peer."""
    drawn: dict[str, str] = field(default_factory=dict)
    """By whose work, who was to compute it again."""
    judges: dict[str, int] = field(default_factory=dict)
    """By liar, how many honest ones can compute its work again."""


class Lying:
    """Of one seed. `ids` are the peer ids by name of all that ever lie."""

    def __init__(self, ids: dict[str, str], together: bool) -> None:
        self.ids = ids
        self.names = {peer_id: name for name, peer_id in ids.items()}
        self.together = together
        """They lie as one: each finds the others' work right, and says so."""
        self.kinds: dict[str, str] = {}
        """In what each lies now, by name."""
        self.told: dict[Deed, dict[str, str]] = {}
        """In which steps who has lied in its work, and how."""
        self.committed: dict[Deed, CommittedStep] = {}
        self.denied: dict[tuple[Deed, str], Denied] = {}
        """By step and the liar's peer id."""
        self.reports: list[str] = []
        """Of honest ones: whom they leave out of a view, and why."""
        self.count = 0
        """Lies of whatever kind that were told."""
        self.has_told: set[tuple[str, str]] = set()
        """Who has told something, and of which kind."""
        self.views: dict[str, ViewId] = {}
        """In which each liar takes its step."""
        self.steps = 1 << 62
        """That train."""
        self.states: dict[bytes, bytes] = {}
        """Of states that were given: digests, by what they should have been."""

    # who is asked ------------------------------------------------------------------------------

    def here(self) -> str:
        """The name of the peer whose turn it is; empty for the world's."""
        process = PROCESS.get()
        return process.peer_name if process is not None else ""

    def kind(self) -> str:
        """In what the peer whose turn it is lies; empty: it does not."""
        return self.kinds.get(self.here(), "")

    def victims(self, peer_ids: Any) -> list[str]:
        """Of these the honest ones, in order: all colluders choose the same."""
        return sorted(peer_id for peer_id in peer_ids if peer_id not in self.names)

    # what was done -----------------------------------------------------------------------------

    def tell(self) -> None:
        """A lie that changes no work."""
        self.count += 1
        self.has_told.add((self.here(), self.kind()))

    def tell_work(self, view: ViewId, step: int) -> None:
        self.tell()
        self.told.setdefault(Deed(view, step), {})[self.ids[self.here()]] = self.kind()

    def commit(self, deed: Deed, digest: str) -> CommittedStep | None:
        """By the peer whose turn it is, if it is honest."""
        if self.here() in self.ids:
            return None
        seen = self.committed.setdefault(deed, CommittedStep())
        seen.digests[self.here()] = digest
        return seen

    def deny(self, deed: Deed, holders: int, peer_ids: Iterable[str]) -> None:
        """By the peer whose turn it is, if it is honest."""
        for peer_id in peer_ids if self.here() not in self.ids else ():
            denied = self.denied.setdefault((deed, peer_id), Denied(holders))
            denied.by.add(self.here())
            if denied.most_at_s is None and 2 * len(denied.by) > holders:
                denied.most_at_s = now.monotonic_s()

    def found_out(self) -> dict[str, float]:
        """Peer ids of liars whose work more than half of all stage-holders, all honest, deny; and
        since when."""
        found: dict[str, float] = {}
        for (_, liar), it in self.denied.items():
            if it.most_at_s is not None:
                found[liar] = min(found.get(liar, it.most_at_s), it.most_at_s)
        return found

    def stayed(self) -> list[int]:
        """Steps that honest peers have committed, and in which somebody had lied in its work."""
        return sorted({deed.step for deed in self.committed if self.told.get(deed)})
