"""What anybody may know of a run, where a member allows it: named one by one, nothing by default.

No peer is named: neither by id nor by name, address or device. No text of the log or of a view gets
here. The only join line here leads to the peer that serves it, whose address the reader has used
already.
"""

from collections.abc import Iterator

import msgspec

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.web.state import DashboardState, History, Sample

SAMPLES_SHOWN = 3
POINTS_SHOWN = 400
DOTS_LIMIT = 4096
MARKS_LIMIT = 8
TEXT_LIMIT = 4096
"""The most characters of a sample, a mark or a name."""
TOLD_LIMIT_BYTES = 256 << 10
LARGEST = 10**18


class Dot(msgspec.Struct, frozen=True, array_like=True):
    """A peer: its place on a map of round trips, 0 to 1, and the pipeline it works in."""

    x: float
    y: float
    pipeline: int | None


class PublicFacts(msgspec.Struct, frozen=True):
    """All that the public page shows."""

    run: str
    digest: str
    state: str
    time_s: float
    step: int
    total_steps: int
    parameter_count: int
    loss: float | None
    held_out_loss: float | None
    tokens_per_s: float | None
    left_s: float | None
    peers: int
    pipelines: int
    join_line: str
    """Empty where newcomers need an invitation, or this peer cannot be called."""
    prompt: str
    samples: tuple[Sample, ...]
    loss_steps: tuple[int, ...]
    losses: tuple[float, ...]
    held_out_steps: tuple[int, ...]
    held_out_losses: tuple[float, ...]
    dots: tuple[Dot, ...]
    marks: tuple[str, ...]
    note: str = ""
    """Why less can be seen than should be, if so."""

    @property
    def is_complete(self) -> bool:
        return self.step >= self.total_steps > 0


def public_facts(state: DashboardState) -> PublicFacts:
    """The public part of what the dashboard knows."""
    live, run, view, history = state.live, state.run, state.view, state.history
    every = -(-len(history.step) // POINTS_SHOWN) or 1
    return PublicFacts(
        run=run.name if run else "",
        digest=run.digest if run else "",
        state=live.state,
        time_s=live.time_s,
        step=live.step,
        total_steps=run.total_steps if run else 0,
        parameter_count=run.parameter_count if run else 0,
        loss=live.loss,
        held_out_loss=live.held_out_loss,
        tokens_per_s=live.tokens_per_s,
        left_s=live.eta_s,
        peers=len(view.peers),
        pipelines=len(view.pipelines),
        join_line=view.own_join_line,
        prompt=state.samples.prompt,
        samples=state.samples.written[-SAMPLES_SHOWN:],
        loss_steps=history.step[::every],
        losses=history.loss[::every],
        held_out_steps=history.held_out_step[-POINTS_SHOWN:],
        held_out_losses=history.held_out_loss[-POINTS_SHOWN:],
        dots=tuple(Dot(round(it.x, 2), round(it.y, 2), it.pipeline) for it in view.peers),
        marks=tuple(mark.partition(":")[0] for mark in live.marks),  # names stand behind the colon
    )


def history_of(facts: PublicFacts) -> History:
    """The losses as a history, for drawing them."""
    return History(
        step=facts.loss_steps,
        loss=facts.losses,
        held_out_step=facts.held_out_steps,
        held_out_loss=facts.held_out_losses,
    )


def nothing_heard(digest: str, join_line: str, note: str) -> PublicFacts:
    """The facts of a run of which no peer has told anything."""
    return PublicFacts(
        run="",
        digest=digest,
        state="nobody answers",
        time_s=0,
        step=0,
        total_steps=0,
        parameter_count=0,
        loss=None,
        held_out_loss=None,
        tokens_per_s=None,
        left_s=None,
        peers=0,
        pipelines=0,
        join_line=join_line,
        prompt="",
        samples=(),
        loss_steps=(),
        losses=(),
        held_out_steps=(),
        held_out_losses=(),
        dots=(),
        marks=(),
        note=note,
    )


def facts_told(body: bytes, digest: str) -> PublicFacts:
    """What another peer says of the run of this digest, as JSON. The peer may have invented all of
    it. Raises `PeerFault` for what cannot be drawn."""
    if len(body) > TOLD_LIMIT_BYTES:
        raise PeerFault(f"tells {len(body)} bytes of a run, more than {TOLD_LIMIT_BYTES}")
    try:
        facts = msgspec.json.decode(body, type=PublicFacts)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise PeerFault(f"what it tells of a run cannot be read: {error}") from error
    if facts.digest != digest:
        raise PeerFault("tells of another run")
    if (wrong := next(_oddities(facts), None)) is not None:
        raise PeerFault(f"tells of a run what cannot be: {wrong}")
    return msgspec.structs.replace(facts, note="")


def _oddities(facts: PublicFacts) -> Iterator[str]:
    if not all(0 <= number < LARGEST for number in _numbers(facts)):  # this refuses NaN, too
        yield "a number"
    if not all(0 <= place <= 1 for dot in facts.dots for place in (dot.x, dot.y)):
        yield "a place"
    texts = (facts.run, facts.state, facts.prompt, *facts.marks)
    if any(len(text) > TEXT_LIMIT for text in (*texts, *(it.text for it in facts.samples))):
        yield "a text"
    curve = (len(facts.loss_steps), len(facts.losses))
    held_out = (len(facts.held_out_steps), len(facts.held_out_losses))
    if any(steps != losses or losses > POINTS_SHOWN for steps, losses in (curve, held_out)):
        yield "the losses"
    counts = (
        (facts.samples, SAMPLES_SHOWN),
        (facts.marks, MARKS_LIMIT),
        (facts.dots, DOTS_LIMIT),
    )
    if any(len(items) > limit for items, limit in counts):
        yield "too much of something"


def _numbers(facts: PublicFacts) -> Iterator[float]:
    yield from (facts.time_s, facts.step, facts.total_steps, facts.parameter_count)
    yield from (facts.peers, facts.pipelines)
    maybe = (facts.loss, facts.held_out_loss, facts.tokens_per_s, facts.left_s)
    yield from (value for value in maybe if value is not None)
    yield from (*facts.loss_steps, *facts.losses, *facts.held_out_steps, *facts.held_out_losses)
    yield from (sample.step for sample in facts.samples)
    yield from (dot.pipeline for dot in facts.dots if dot.pipeline is not None)
