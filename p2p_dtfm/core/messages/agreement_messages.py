"""What peers say to one another while they agree on a view."""

import math
from collections.abc import Collection, Iterable

import msgspec

from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.prepared import StepOutcome, open_prepared
from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.messages.work import Work
from p2p_dtfm.core.protocol.canonical import Numbered, digest, encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Sign, Signed, Verify, open_signed, sign
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, Member, ViewId

_CONTRIBUTION = "contribution"
PREPARED_LIMIT = 1024
"""Prepared in a contribution: of two steps, and as many that were refused."""
RETAINED_LIMIT = 16
"""Stage-holders up to which contributions always carry the Prepared of the last step. Where there
are more, only contributors that see members start from different states pass them on."""


class KnownView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is remembered of a view, also on disk."""

    view: ViewId
    members: tuple[Member, ...]
    plan_digest: str

    @property
    def peer_ids(self) -> frozenset[str]:
        return frozenset(member.peer_id for member in self.members)


class PresentView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The view that a contributor is active in."""

    view: ViewId
    members: tuple[Member, ...]
    plan: Plan | None


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers of a checkpoint on disk, or of a cut, and the lineage that they lie on."""

    version: int
    lineage: str
    layers: tuple[int, ...]


class PendingStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step of the present view that was under way when this peer entered Gather."""

    step: int
    base: str
    """Lineage digest of the states that the step starts from."""
    prepared: tuple[Signed, ...]
    """All Prepared that this peer had received, its own, and those that it has refused, as their
    makers signed them."""
    reduced_layers: tuple[int, ...]
    """The layers of which this peer has the step's reduced gradients."""
    progress: StageProgress | None = None
    """What this peer has computed, and keeps, of the step's microbatches."""
    counts: dict[str, int] = {}
    """For how many microbatches each peer with the head counts the loss (`loss_counts`)."""


class RetainedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last step that this peer committed, kept until a later one commits.

    `outcome` is None at a peer without a stage that knows only that the step was committed. It is
    also None where this is the step under way when the peer's last view with steps failed. Others
    may have committed that one.
    """

    view: ViewId
    step: int
    base: str
    outcome: StepOutcome | None
    reduced_layers: tuple[int, ...]
    prepared: tuple[Signed, ...] = ()
    """The Prepared by which it was committed here: so a peer that said another one is found out."""


class Contribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One peer's part of the snapshot, fixed when it enters Gather. Others relay it: signed."""

    member: Member
    number: int
    record: Signed
    present: PresentView | None
    step: int
    """Committed steps."""
    held: Numbered[int]
    """The layers whose state this peer has, with their versions."""
    joiners: tuple[Member, ...]
    """Newcomers that asked this peer to be let in; their records travel in `Gather.newcomers`."""
    lineages: Numbered[str] = {}
    """Lineage digest of each version in `held`; a version without one is of no use to others."""
    saved: tuple[SavedState, ...] = ()
    cuts: tuple[SavedState, ...] = ()
    """What this peer has of cuts. A view whose guardians lag promises to go back no further."""
    pending: PendingStep | None = None
    retained: RetainedStep | None = None
    accepts_loss: bool = False
    """Whether this peer has waited long enough for lost layers, and goes back to what is left."""
    may_repeat: int = 0
    """Steps that a failure may cost, as this peer's newest view with a plan said."""
    accusers: tuple[str, ...] = ()
    """Peers that this one has seen accuse others again and again, whom most peers heard."""
    doubted: tuple[tuple[str, str], ...] = ()
    """Pairs, in order of ids: one of each was lately wrong or out of reach, nobody knew which."""
    bars: tuple[Bar, ...] = ()
    """The bars that this peer knows of from the views it was in."""
    origins: tuple[KnownView, ...] = ()
    """Views from which this peer's view came, newest first: for each peer that is no member of it,
    the newest view that this one was in. A newcomer tells the views that it was in itself."""


class Accusation(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, order=True
):
    """Evidence about a link: `by` cannot reach `of`."""

    by: Member
    of: Member


class Charge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, order=True):
    """An accusation as its maker signed it, for one attempt: others relay it as it is."""

    accusation: Accusation
    signature: bytes


class Gather(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gather"):
    """All that the sender knows for view `number`, and the digest of that.

    Without a digest the sender knows nothing: it has passed that number, or has not heard that all
    agreed on it (`passed`)."""

    sender: Member
    number: int
    planned: bool
    base: ViewId
    round: int
    contributions: tuple[Signed, ...]
    absent: tuple[Member, ...]
    digest: str
    accusations: tuple[Charge, ...] = ()
    newcomers: tuple[Signed, ...] = ()
    """Records of the newcomers that the contributions name."""
    certificates: tuple[Certificate, ...] = ()
    """Certificates of contributors' views, for receivers to whom they may be news."""


def passed(sender: Member, number: int) -> Gather:
    """The answer to a peer that gathers for a number that the sender has passed, or that has gone
    on to this number without the sender."""
    return Gather(sender, number, number % 2 == 0, GENESIS, 0, (), (), "")


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The sender's knowledge for this view is frozen, and gives this plan and these members."""

    sender: Member
    view: ViewId
    plan_digest: str
    members_digest: str
    signature: bytes = b""


class Synced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="synced"):
    """The sender holds, or follows, all state that its place in the view needs."""

    sender: Member
    view: ViewId
    signature: bytes = b""


class Active(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="active"):
    """The sender has taken over: from `step` on, steps happen in this view.

    `asks` asks for the receiver's own Active, which the sender has not heard yet.
    """

    sender: Member
    view: ViewId
    step: int
    lineage: str = ""
    """The lineage of the states from which `step` starts."""
    asks: bool = False
    certificate: Certificate | None = None
    """For a receiver that still waits for a Ready of this view."""
    signature: bytes = b""


class Reminder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A view in which the receiver has been, as its own signatures show. It may have forgotten the
    view with its disk."""

    certificate: Certificate
    """The view's certificate, with the receiver's Ready alone."""
    active: Active
    """The receiver's Active, since not every view that a peer said Ready to was taken over."""


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="standing"):
    """Where the sender stands, told to peers outside its view: they left it, or were cut off.

    `ancestors` are views that the sender was in before, newest first. `commit` holds Prepared of
    the last committed step, as their makers signed them. `follows` names peers that the sender's
    user told it to go to, wherever they are. `reminder` is for the receiver, if it seems to know
    none of the ancestors. `farewells` are certificates of ancestors, signed by peers that have left
    since.
    """

    sender: Member
    certificate: Certificate
    has_plan: bool
    step: int
    run_digest: str
    """Swarms of several runs may meet in one directory."""
    ancestors: tuple[ViewId, ...] = ()
    commit: tuple[Signed, ...] = ()
    follows: tuple[str, ...] = ()
    reminder: Reminder | None = None
    farewells: tuple[Certificate, ...] = ()
    signature: bytes = b""

    @property
    def view(self) -> ViewId:
        return self.certificate.view

    @property
    def members(self) -> tuple[Member, ...]:
        return self.certificate.members


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="heartbeat"):
    """The sender lives. `progress` grows with each piece of work that it completes."""

    sender: Member
    progress: int
    work: Work | None = None
    """Where the sender stands in the step under way, and what it lacks from whom; None if it takes
    no steps."""
    gives: dict[str, int] = {}
    """Bytes of files that the sender has given each peer that is to join and lacks states. They
    count from when the next view was agreed on."""
    missed: tuple[str, ...] = ()
    """Members that the sender has not heard for a while. It asks whether others hear them."""
    silent_ms: dict[str, int] = {}
    """For each member that others miss: for how long the sender has not heard it either."""


class JoinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join_request"):
    """A measured newcomer asks to be let in at the next view.

    `awaits` is the agreed view that it waits to take over; without one, it has given up any such.
    `passed` is the highest number of an attempt that it has said Ready to or given up: only a
    higher one is of use to it. A newcomer that gives up a view has passed its number.
    """

    record: Signed
    awaits: ViewId | None = None
    passed: int = 0


class ReadySet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Ready of several peers that say the same."""

    view: ViewId
    plan_digest: str
    members_digest: str
    said: tuple[tuple[Member, bytes], ...]
    """The peers that say so, each with the signature of its Ready."""


class RetainedBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A retained step as most contributors tell it: `said` has neither Prepared nor layers."""

    said: RetainedStep
    prepared: tuple[bytes, ...]
    """Names of its Prepared, in the order in which they stand in the step."""


class Bodies(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What outlines of contributions name by digest, for receivers to whom it may be news."""

    records: tuple[Signed, ...] = ()
    views: tuple[KnownView, ...] = ()
    plans: tuple[Plan, ...] = ()
    retained: tuple[RetainedBody, ...] = ()
    prepared: tuple[Signed, ...] = ()


class Spread(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="spread"
):
    """What is new to the sender in a swarm of many, for one of its neighbours in the overlay.

    A Spread says for many peers what Gather and Ready say for one. `wants` asks for contributions
    of these peers, `wants_ready` for their Ready.
    """

    sender: Member
    number: int
    planned: bool
    base: ViewId
    round: int
    digest: str
    """The digest of all that the sender knows, once it knows all; empty before."""
    contributions: tuple[Signed, ...] = ()
    """Outlines of contributions."""
    bodies: Bodies = Bodies()
    absent: tuple[Member, ...] = ()
    accusations: tuple[Charge, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    ready_sets: tuple[ReadySet, ...] = ()
    wants: tuple[str, ...] = ()
    wants_ready: tuple[str, ...] = ()


class ActiveSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Active of several peers that say the same."""

    step: int
    lineage: str
    said: tuple[tuple[Member, bytes], ...]


class Tidings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="tidings"
):
    """In a view of many: peers that the sender newly knows to be synced or active, for one of its
    neighbours. `wants` asks for what the named peers have said."""

    sender: Member
    view: ViewId
    synced: tuple[tuple[Member, bytes], ...] = ()
    active: tuple[ActiveSet, ...] = ()
    wants: tuple[str, ...] = ()


AgreementMessage = (
    Gather | Ready | Spread | Tidings | Synced | Active | Standing | Heartbeat | JoinRequest
)


def sign_contribution(contribution: Contribution, signer: Sign) -> Signed:
    return sign(contribution.member.peer_id, _CONTRIBUTION, encode_for_wire(contribution), signer)


def open_contribution(signed: Signed, verify: Verify) -> Contribution:
    """Raises `PeerFault` for a forgery or malformed contents.

    The maker must check what others said before it passes that on: a forgery in it is its fault.
    """
    contribution = open_signed(signed, _CONTRIBUTION, Contribution, verify)
    require_passed_on(contribution.pending, contribution.retained, signed.peer_id, verify)
    return contribution


def require_passed_on(
    pending: PendingStep | None, retained: RetainedStep | None, maker: str, verify: Verify
) -> None:
    """Raises `PeerFault` for what a contributor cannot have been told."""
    if retained is not None and not _may_be(retained):
        raise PeerFault(f"an outcome of step {retained.step} that no step has", maker)
    passed_on = prepared_in(pending, retained)
    require_few_prepared(len(passed_on), maker)
    require_all_prepared(passed_on, maker, verify)


def require_all_prepared(passed_on: Iterable[Signed], by: str, verify: Verify) -> None:
    """Raises `PeerFault` against `by`, which passes them on, for forgeries or malformed ones."""
    for said in passed_on:
        try:
            open_prepared(said, verify)
        except PeerFault as fault:
            raise PeerFault(f"passes on a Prepared: {fault.cause}", by) from fault


def prepared_in(pending: PendingStep | None, retained: RetainedStep | None) -> tuple[Signed, ...]:
    """All Prepared that a contribution passes on."""
    passed_on = pending.prepared if pending is not None else ()
    return passed_on + (retained.prepared if retained is not None else ())


def require_few_prepared(count: int, maker: str) -> None:
    """Raises `PeerFault` where a peer passes on more Prepared than there can be."""
    if count > PREPARED_LIMIT:
        raise PeerFault(f"passes on {count} Prepared", maker)


def _may_be(retained: RetainedStep) -> bool:
    """Whether the outcome is possible: others may apply it to their states."""
    outcome = retained.outcome
    if outcome is None:
        return True
    numbers = [outcome.gradient_norm, outcome.loss or 0.0, outcome.held_out_loss or 0.0]
    return outcome.step == retained.step and all(math.isfinite(n) and n >= 0 for n in numbers)


def knowledge_digest(
    number: int,
    contributions: dict[Member, Signed],
    absent: set[Member],
    accusations: Collection[Accusation] = (),
) -> str:
    """Digest of what has been gathered: equal at all peers exactly when they know the same."""
    known = [(member, contributions[member].payload) for member in sorted(contributions)]
    return digest((number, known, sorted(absent), sorted(accusations)))
