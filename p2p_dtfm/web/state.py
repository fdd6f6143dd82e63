"""What the dashboard shows, as plain typed data. The daemon makes it; nothing here asks anybody.

A state has parts that change at different speeds: `Live` every second, `History` and `Timeline`
with steps, `ViewState` with views. Where there are many peers, they are named by their number in
`ViewState.peers`. What a peer says of itself (its device's name) is text of a stranger and must be
shown as text.
"""

import msgspec


class RunFacts(msgspec.Struct, frozen=True):
    """The run that is trained."""

    name: str
    digest: str
    layer_count: int
    block_count: int
    width: int
    context: int
    parameter_count: int
    tokens_per_step: int
    total_steps: int


class PeerFacts(msgspec.Struct, frozen=True):
    """A member of the view. `pipeline` and `position` are None for a peer without a stage."""

    peer_id: str
    name: str
    """The peer's name as people use it; no two members have the same."""
    device: str
    memory_bytes: int
    block_ns: int
    """Forward and backward of one transformer block and microbatch, as the peer measured it."""
    intent: str
    reachability: str
    uplink_bytes_per_s: int
    downlink_bytes_per_s: int
    """0 where no shared limit is known."""
    x: float
    y: float
    """The place on the map, where distances resemble the square roots of round trips: 0 to 1, `y`
    downwards."""
    pipeline: int | None = None
    position: int | None = None
    first_layer: int = 0
    end_layer: int = 0
    in_flight: int = 0


class PipelineFacts(msgspec.Struct, frozen=True):
    """A pipeline's peers in the order of their stages."""

    peers: tuple[int, ...]
    microbatch_count: int


class Flow(msgspec.Struct, frozen=True):
    """What two peers send each other in a step.

    `use` is the fraction of the predicted step for which the busier direction transmits.
    """

    here: int
    there: int
    kind: str
    """"pipeline" (activations one way, their gradients the other), "reduction", or "guard" (reduced
    gradients from the only holder of layers to their guardian)."""
    there_bytes: int
    """Bytes in a step from here to there, as they travel."""
    here_bytes: int
    """Bytes in a step from there to here; 0 for "guard"."""
    bytes_per_s: int | None
    """The measured rate of the slower direction; None where neither end has measured it."""
    round_trip_ns: int | None
    use: float | None


class MyPart(msgspec.Struct, frozen=True):
    """What this peer contributes in the view."""

    role: str
    share: float
    """Its share of the step's computation: layers times microbatches."""
    step_ns: int
    """The plan's predicted step time."""
    other_step_ns: int | None
    """For a spare: the predicted step time of the best plan with it. None where impossible, or not
    known."""
    guards: tuple[int, ...] = ()
    """Layers of others of which this peer keeps the only copy."""
    why_spare: str = ""
    """A sentence; empty where a plan with this peer was found, and would be no faster."""


class ViewState(msgspec.Struct, frozen=True):
    """The view in force; `number` is None before the first."""

    number: int | None = None
    snapshot: str = ""
    plan: str = ""
    from_step: int = 0
    predicted_step_ns: int = 0
    no_plan: str = ""
    """Why there is no plan, if there is none."""
    me: int | None = None
    peers: tuple[PeerFacts, ...] = ()
    pipelines: tuple[PipelineFacts, ...] = ()
    flows: tuple[Flow, ...] = ()
    are_flows_left_out: bool = False
    """Whether flows between other members are left out, because very many members are in no
    pipeline."""
    part: MyPart | None = None
    join_line: str = ""
    """The line to be passed on. It works for as long as one of the members in it lives."""
    own_join_line: str = ""
    """The line with this peer's address alone. Empty where others cannot call it."""


class MeasuredWorth(msgspec.Struct, frozen=True):
    """What the swarm did before this peer came and does now, both as measured."""

    before_tokens_per_s: float
    before_members: int
    now_tokens_per_s: float | None
    """None while it is not measured yet."""
    now_members: int


class Problem(msgspec.Struct, frozen=True):
    """Something that is wrong now, and what to do about it."""

    what: str
    fix: str
    name: str = ""
    """The same name for as long as the problem lasts, whatever else is said of it. Empty where the
    text is all."""


class Event(msgspec.Struct, frozen=True):
    """A line of the swarm's history as this peer saw it."""

    time_s: float
    kind: str
    """"view", "joined", "left", "fault", "note"."""
    text: str


class RefusedCount(msgspec.Struct, frozen=True, array_like=True):
    """A count of what the gate has turned away."""

    sender: str
    """What the senders were to this peer: stranger, newcomer, contributor, member or former."""
    kind: str
    reason: str
    count: int


class Live(msgspec.Struct, frozen=True):
    """The part that changes from second to second."""

    time_s: float
    """When this was made, in seconds since 1970, by the daemon's clock."""
    version: str
    peer_id: str
    state: str
    reason: str
    since_s: float
    name: str = ""
    """What this peer is called; empty before it has an identity."""
    step: int = 0
    loss: float | None = None
    held_out_loss: float | None = None
    tokens_per_s: float | None = None
    step_ns: int | None = None
    """The time that recent steps took, as measured."""
    eta_s: float | None = None
    committed_here: int = 0
    """Steps that this process has seen committed."""
    undone_here: int = 0
    """How many of these were taken back because a liar had, or may have had, a hand in them."""
    waits_for: tuple[str, ...] = ()
    """Peers without whom the step does not commit."""
    next: tuple[str, ...] = ()
    """What happens next, soonest first. For a complete run, what can be typed."""
    problems: tuple[Problem, ...] = ()
    worth: MeasuredWorth | None = None
    """None for a peer that was there from the beginning, or did not learn what was before it."""
    heard_s_ago: tuple[float | None, ...] = ()
    """Seconds ago, parallel to the view's peers. None for this peer, for peers never heard, and,
    where members are many, for those that speak with others only."""
    silent_after_s: float = 10.0
    """A peer that was not heard for longer is unusually silent."""
    work: str = ""
    """Something long that is being done, such as fetching; empty if there is nothing."""
    work_share: float | None = None
    """How much of `work` is done."""
    work_left_s: float | None = None
    marks: tuple[str, ...] = ()
    """What makes the figures those of a laboratory: shaped links, emulated devices."""
    refused: tuple[RefusedCount, ...] = ()
    this_machine: tuple[str, ...] = ()
    """The ids of all peers that compute with this machine's devices; empty where this peer is
    alone."""


class History(msgspec.Struct, frozen=True):
    """Columns of equal length. For a long run, evenly spaced steps.

    `generation` changes when earlier points changed; otherwise the columns only grow.
    """

    generation: int = 0
    step: tuple[int, ...] = ()
    loss: tuple[float, ...] = ()
    tokens_per_s: tuple[float | None, ...] = ()
    held_out_step: tuple[int, ...] = ()
    held_out_loss: tuple[float, ...] = ()
    view_step: tuple[int, ...] = ()
    """Steps at which a view took over."""


class Sample(msgspec.Struct, frozen=True):
    """What the model made of the prompt. Shown as text: it may be anything."""

    step: int
    """How many steps the model had had."""
    text: str
    held_out_loss: float | None = None


class Samples(msgspec.Struct, frozen=True):
    """Text that the model has written over the steps, in their order."""

    prompt: str = ""
    written: tuple[Sample, ...] = ()
    note: str = ""
    """Why the newest sample is missing, if it is."""


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer has given in some time. `tokens` counts tokens through as many layers as the
    model has: a peer that computes half of the layers gives half a token for each."""

    tokens: float = 0
    steps: int = 0
    seconds: float = 0
    """The time of steps that had this peer as a member."""
    sent_bytes: int = 0
    """Bytes sent, by the plan's count."""
    guarded_bytes: int = 0


class BoardRow(msgspec.Struct, frozen=True):
    """The row of a peer that has computed. The name is text of a stranger."""

    peer_id: str
    name: str
    tokens: float


class Course(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run as a whole, as this peer saw it. Times are in seconds since 1970."""

    began_s: float | None = None
    """When its first view took over."""
    ended_s: float | None = None
    """When the last step was committed; None where it was not yet, or not seen."""
    losses: int = 0
    """Members that were lost without leaving in an orderly way."""
    views: int = 0
    """Views that took over."""


class ContributionBoard(msgspec.Struct, frozen=True):
    """What this peer gave, and the swarm's board, from the most to the least."""

    today: Given = Given()
    week: Given = Given()
    """The last seven days."""
    ever: Given = Given()
    board: tuple[BoardRow, ...] = ()
    """The rows; of very many, those with the most."""
    board_peers: int = 0
    """How many peers have computed, also those left out of `board`."""
    board_tokens: float = 0
    """The tokens of all of them."""
    board_steps: int = 0
    """How many steps the board covers: those that this peer has seen, or others have shown it."""
    useful_tokens: float = 0
    """The part of `ever` that stayed, as far as this peer knows. Summed over all that know: the
    run's tokens."""
    repeated_tokens: float = 0
    """The rest of `ever`, which was lost in a failure, and done again."""
    course: Course = Course()
    day: str = ""
    """The date of `today`; empty where nothing was given."""
    days: dict[str, Given] = {}
    """Each of the last seven days on which something was given."""


SPAN_KINDS = (
    "forward",
    "backward",
    "evaluate",
    "wait",
    "reduce",
    "guard",
    "audit",
    "commit",
    "apply",
    "save",
)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that a peer did during a step, in nanoseconds from the timeline's start.

    `kind`: "forward", "backward", "evaluate", "wait" (for a neighbour's tensor), "reduce",
    "guard" (waiting for guardians' receipts), "audit" (another's work again), "commit" (waiting for
    everyone's Prepared), "apply", "save".
    `number` is the microbatch, or the first layer of the segment.
    """

    kind: str
    number: int
    start_ns: int
    end_ns: int


class TimelineLane(msgspec.Struct, frozen=True):
    """The spans of one peer. `clock_error_ns` bounds what its clock may be off by on the page."""

    peer_id: str
    spans: tuple[Span, ...]
    clock_error_ns: int


class Timeline(msgspec.Struct, frozen=True):
    """A step of the pipeline that this peer is in (of the first one, for a spare)."""

    step: int | None = None
    duration_ns: int = 0
    lanes: tuple[TimelineLane, ...] = ()
    missing: tuple[str, ...] = ()
    """Peers that did not report."""


class DashboardState(msgspec.Struct, frozen=True):
    """The dashboard's whole state."""

    live: Live
    run: RunFacts | None = None
    view: ViewState = ViewState()
    history: History = History()
    timeline: Timeline = Timeline()
    samples: Samples = Samples()
    contribution: ContributionBoard = ContributionBoard()
    events: tuple[Event, ...] = ()
    """Newest first."""
