"""What anybody may know of a run, where a member allows it: named one by one, nothing by default.

No peer is named: neither by id nor by name, address or device. A text of the log or of a view
never gets here, and of the join line only the one that leads to the peer that serves it, whose
address whoever asks has used already.
"""

import msgspec

from p2p_dtfm.web.state import DashboardState, History, Sample

SAMPLES_SHOWN = 3
POINTS_SHOWN = 400


class Dot(msgspec.Struct, frozen=True, array_like=True):
    """A peer: where it is on a map of round trips, 0 to 1, and which pipeline it works in."""

    x: float
    y: float
    pipeline: int | None


class PublicFacts(msgspec.Struct, frozen=True):
    """All of the public page."""

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


def public_facts(state: DashboardState) -> PublicFacts:
    """Of what the dashboard knows."""
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
        marks=tuple(mark.partition(":")[0] for mark in live.marks),  # behind it are names
    )


def history_of(facts: PublicFacts) -> History:
    """For a drawing of the losses."""
    return History(
        step=facts.loss_steps,
        loss=facts.losses,
        held_out_step=facts.held_out_steps,
        held_out_loss=facts.held_out_losses,
    )
