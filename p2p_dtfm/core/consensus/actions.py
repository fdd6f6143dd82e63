"""What the agreement asks its caller to do, and how long each of its parts may take."""

from dataclasses import dataclass

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.messages.agreement_messages import AgreementMessage
from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.recovery.partial_replay import PartialReplay
from p2p_dtfm.core.recovery.recovery_evidence import Restart
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.units import SECOND_NS

BATCH_NS = SECOND_NS // 50
"""How long news for the overlay waits, so that more of it travels in the same message."""


@dataclass(frozen=True)
class AgreementTiming:
    """How long each part may take without progress."""

    join_window_ns: int = SECOND_NS // 2
    """Newcomers that ask within this time of one another are let in together."""
    resend_ns: int = SECOND_NS
    """Time between repeats of an unanswered message."""
    gather_ns: int = 6 * SECOND_NS
    """How long a Gather may stand still."""
    ready_ns: int = 120 * SECOND_NS
    """How long the Ready of others may take, planning included."""
    retry_ns: int = 3 * SECOND_NS
    """Time from an attempt that was given up to the next one."""
    backoff_ns: int = SECOND_NS
    """Wait before another attempt after two failed ones. It doubles each time, with jitter, up to
    `backoff_limit_ns`."""
    backoff_limit_ns: int = 30 * SECOND_NS
    meet_ns: int = 5 * SECOND_NS
    """Time between two rounds in which a member tells peers outside the view of it."""
    sleep_ns: int = 5 * SECOND_NS
    """A longer time between two ticks means that this peer was asleep."""
    lost_layers_ns: int = 60 * SECOND_NS
    """How long to wait for somebody who holds lost layers before going back to a checkpoint."""
    sync_ns: int = 1800 * SECOND_NS
    """How long an agreed planned view may take to be synced, before it is given up."""
    newcomer_ns: int = 2 * SECOND_NS
    """How long a newcomer alone may hold up a Gather in which everyone else has settled."""
    newcomer_sync_ns: int = 8 * SECOND_NS
    """How long a newcomer may take, beyond what its link needs, without getting more states."""
    orphan_ns: int = 0
    """A newcomer that hears of no view for so long makes one with other newcomers; 0: never."""
    wide_above: int = 64
    """In a view of more members than this, each speaks with its neighbours of the overlay only."""


WIDE_ABOVE = 16
"""In daemons, from the 17th member on, each speaks with its neighbours of the overlay only.
Speaking with all takes more of a small machine than it has."""
LAN = AgreementTiming(resend_ns=SECOND_NS // 2, retry_ns=2 * SECOND_NS, wide_above=WIDE_ABOVE)
WAN = AgreementTiming(wide_above=WIDE_ABOVE)
"""The deadlines of `LAN` and `WAN` are alike: a busy machine is slow on any network."""


@dataclass(frozen=True)
class SendMessage:
    to: tuple[str, ...]
    message: AgreementMessage | SignedPrepared


@dataclass(frozen=True)
class PassOnSoon:
    """Call `pass_on` after `after_ns`: what has come by then goes on together."""

    after_ns: int


@dataclass(frozen=True)
class ComputePlan:
    """Plan this snapshot and give the result to `plan_computed`."""

    snapshot: Snapshot


@dataclass(frozen=True)
class StopStep:
    """A failure: compute and say nothing more for the present view, and keep all that it made.

    The caller keeps its states. It also keeps the reduced gradients of this step and of the one
    before, as far as no state here has taken them. It keeps both until a later step commits in the
    next view.
    """


@dataclass(frozen=True)
class TakeSides:
    """In the attempt under way other peers accuse each other (`Agreement.doubted`).

    Say at once, by `hold_up`, which of them this peer would soon have accused as well.
    """


@dataclass(frozen=True)
class ViewAgreed:
    """Bring the state that the view asks of this peer, then call `synced`.

    `discard`: this peer is new to a swarm that trains; drop all states it may have had before.
    """

    view: View
    discard: bool = False


@dataclass(frozen=True)
class TakeOver:
    """From `step` on, steps happen in `view`, and commit in `ledger` (None without a plan).

    `restart` says what becomes of this peer's states in an unplanned view. It is None in a planned
    view, and in a view without a plan, where all states stay as they are. `replay` says what is
    kept of the step under way; if it is None, `step` begins anew.
    """

    view: View
    step: int
    ledger: Ledger | None = None
    restart: Restart | None = None
    replay: PartialReplay | None = None
    went_back: "WentBack | None" = None


@dataclass(frozen=True)
class WentBack:
    """The run takes back what was committed from `to_step` on, and does it again without `peers`,
    which are barred for false work.

    `is_far_enough`: nothing stays that they may have done since `undo_steps` before the proof.
    """

    from_step: int
    to_step: int
    peers: tuple[str, ...]
    is_far_enough: bool = True


@dataclass(frozen=True)
class Left:
    """The others went on without this peer, as it asked."""


@dataclass(frozen=True)
class Rejoin:
    """This peer is in no view any more: the others went on without it, or their lineage counts.

    Call `begin_life` with a higher life, and ask to join again.
    """

    reason: str
    gives_up_steps: bool = False
    """This peer's side of a split swarm has trained, and the other side's lineage counts."""
    pause_ns: int = 0
    """How long to wait before asking."""
    is_needed: bool = False
    """This peer has states that the others may need: it comes back even if it wants to leave."""


@dataclass(frozen=True)
class Report:
    """A change worth a line in the log."""

    text: str


@dataclass(frozen=True)
class Disagreed:
    """Most others have planned this snapshot differently: keep it, so that somebody can find out
    why.

    `reason` says so in words for the user. Other actions say what becomes of this peer.
    """

    reason: str
    snapshot: Snapshot


Action = (
    SendMessage
    | PassOnSoon
    | ComputePlan
    | StopStep
    | TakeSides
    | ViewAgreed
    | TakeOver
    | Left
    | Rejoin
    | Report
    | Disagreed
)
Actions = list[Action]


@dataclass(frozen=True)
class Verdict:
    """What comes of a message: what to do about it, and the reason for that or for doing
    nothing."""

    actions: Actions
    reason: str


@dataclass(frozen=True)
class Heard:
    """For this peer's user: what became of a message."""

    sender: str
    message: str
    reason: str


def refused(reason: str) -> Verdict:
    """Do nothing about the message, for this reason."""
    return Verdict([], reason)
