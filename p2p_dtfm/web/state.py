"""What the dashboard shows, as plain typed data. The daemon makes it; nothing here asks anybody.

A state has parts that change at different speeds: `Live` every second, `History` and `Timeline`
with steps, `ViewState` with views. Peers are named by their number in `ViewState.peers`
wherever there are many of them. What a peer says of itself (its device's name) is text of a
stranger and must be shown as text.
"""

import msgspec


class RunFacts(msgspec.Struct, frozen=True):
    """What is trained."""

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
    """As people call it; no two members have the same."""
    device: str
    memory_bytes: int
    block_ns: int
    """Forward and backward of one transformer block and microbatch, as the peer measured it."""
    intent: str
    reachability: str
    uplink_bytes_per_s: int
    downlink_bytes_per_s: int
    """0: no shared limit is known."""
    x: float
    y: float
    """On the map: distances resemble the square roots of round trips; 0 to 1, `y` downwards."""
    pipeline: int | None = None
    position: int | None = None
    first_layer: int = 0
    end_layer: int = 0
    in_flight: int = 0


class PipelineFacts(msgspec.Struct, frozen=True):
    """Peers in the order of their stages."""

    peers: tuple[int, ...]
    microbatch_count: int


class Flow(msgspec.Struct, frozen=True):
    """What two peers send each other in a step.

    `use` is the fraction of the predicted step for which the slower direction transmits.
    """

    here: int
    there: int
    kind: str
    """"pipeline" (activations one way, their gradients the other), "reduction", or "guard" (reduced
    gradients from the only holder of layers to their guardian)."""
    there_bytes: int
    """In a step from here to there, as they travel."""
    here_bytes: int
    """In a step from there to here; 0 of "guard"."""
    bytes_per_s: int | None
    """Of the slower direction, as measured; None where neither end has measured it."""
    round_trip_ns: int | None
    use: float | None


class MyPart(msgspec.Struct, frozen=True):
    """What this peer is good for in the view."""

    role: str
    share: float
    """Of the step's computation: layers times microbatches."""
    step_ns: int
    """Predicted, as the plan is."""
    other_step_ns: int | None
    """Of a spare: predicted, of the best plan with it; None: impossible, or not known."""
    guards: tuple[int, ...] = ()
    """Layers of others of which this peer keeps the only copy."""
    why_spare: str = ""
    """A sentence; empty where a plan with it was found, and would be no faster."""


class ViewState(msgspec.Struct, frozen=True):
    """The view in force; `number` is None before the first."""

    number: int | None = None
    snapshot: str = ""
    plan: str = ""
    from_step: int = 0
    predicted_step_ns: int = 0
    no_plan: str = ""
    """Why there is no plan, if so."""
    me: int | None = None
    peers: tuple[PeerFacts, ...] = ()
    pipelines: tuple[PipelineFacts, ...] = ()
    flows: tuple[Flow, ...] = ()
    are_flows_left_out: bool = False
    """Of very many that are in no pipeline those between others."""
    part: MyPart | None = None
    join_line: str = ""
    """To be passed on: it works for as long as one of the members in it lives."""
    own_join_line: str = ""
    """With no address but this peer's, and empty where others cannot call it."""


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
    """The same for as long as it lasts, whatever else is said of it; empty: what is said is all."""


class Event(msgspec.Struct, frozen=True):
    """A line of the swarm's history as this peer saw it."""

    time_s: float
    kind: str
    """"view", "joined", "left", "fault", "note"."""
    text: str


class RefusedCount(msgspec.Struct, frozen=True, array_like=True):
    """What the gate has turned away."""

    sender: str
    """What the senders were to this peer: stranger, newcomer, contributor, member or former."""
    kind: str
    reason: str
    count: int


class Live(msgspec.Struct, frozen=True):
    """What changes from second to second."""

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
    """Measured, of late."""
    eta_s: float | None = None
    committed_here: int = 0
    """Steps that this process has seen committed."""
    undone_here: int = 0
    """Of these, such as were taken back since a liar had had a hand in them, or may have."""
    waits_for: tuple[str, ...] = ()
    """Peers without whom the step does not commit."""
    next: tuple[str, ...] = ()
    """What happens next, soonest first; of a complete run, what can be typed."""
    problems: tuple[Problem, ...] = ()
    worth: MeasuredWorth | None = None
    """None for a peer that was there from the beginning, or did not learn what was before it."""
    heard_s_ago: tuple[float | None, ...] = ()
    """Parallel to the view's peers; None for this peer, for peers never heard, and, where members
    are many, for those that speak with others only."""
    silent_after_s: float = 10.0
    """Whoever was not heard for longer is unusually silent."""
    work: str = ""
    """Something long that is done now, such as fetching; empty if nothing is."""
    work_share: float | None = None
    """How much of it is done."""
    work_left_s: float | None = None
    marks: tuple[str, ...] = ()
    """What makes the figures those of a laboratory: shaped links, emulated devices."""
    refused: tuple[RefusedCount, ...] = ()
    this_machine: tuple[str, ...] = ()
    """The ids of all peers that compute with this machine's devices; empty where it is alone."""


class History(msgspec.Struct, frozen=True):
    """Columns of equal length; of a long run, evenly spaced steps.

    `generation` changes when earlier points changed; else the columns only grow.
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
    """Why the newest one is missing, if so."""


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer has given in some time. `tokens`: taken through as many layers as the model has;
    who computes half of the layers gives half a token for each."""

    tokens: float = 0
    steps: int = 0
    seconds: float = 0
    """In which steps were taken with this peer as a member."""
    sent_bytes: int = 0
    """As the plan has it."""
    guarded_bytes: int = 0


class BoardRow(msgspec.Struct, frozen=True):
    """Of one who has computed. The name is text of a stranger."""

    peer_id: str
    name: str
    tokens: float


class Course(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the run as a whole, as this peer saw it; times in seconds since 1970."""

    began_s: float | None = None
    """When its first view took over."""
    ended_s: float | None = None
    """When the last step was committed; None: not yet, or not seen."""
    losses: int = 0
    """Members that were lost without leaving in an orderly way."""
    views: int = 0
    """That took over."""


class ContributionBoard(msgspec.Struct, frozen=True):
    """This peer's own, and the swarm's board, from the most to the least."""

    today: Given = Given()
    week: Given = Given()
    """The last seven days."""
    ever: Given = Given()
    board: tuple[BoardRow, ...] = ()
    """Of very many, those with the most."""
    board_peers: int = 0
    """How many have computed: also those that are left out above."""
    board_tokens: float = 0
    """Of all of them."""
    board_steps: int = 0
    """How many steps the board is of: those that this peer has seen, or others have shown it."""
    useful_tokens: float = 0
    """Of `ever`: what stayed, as far as this peer knows. Of all that know: the run's tokens."""
    repeated_tokens: float = 0
    """The rest of `ever`: it was lost in a failure, and done again."""
    course: Course = Course()
    day: str = ""
    """Which one `today` is; empty of nothing."""
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
    """Peers that did not say."""


class DashboardState(msgspec.Struct, frozen=True):
    """Everything at once."""

    live: Live
    run: RunFacts | None = None
    view: ViewState = ViewState()
    history: History = History()
    timeline: Timeline = Timeline()
    samples: Samples = Samples()
    contribution: ContributionBoard = ContributionBoard()
    events: tuple[Event, ...] = ()
    """Newest first."""
