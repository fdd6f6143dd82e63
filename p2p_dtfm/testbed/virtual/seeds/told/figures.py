"""The figures that a daemon tells, against those of the world."""

import math
from collections.abc import Iterator
from typing import Any

from p2p_dtfm.testbed.virtual.seeds.judge import TOLERANCE
from p2p_dtfm.testbed.virtual.seeds.saved import has_saved_all
from p2p_dtfm.testbed.virtual.seeds.told.world import Falsehood, Truth, Word
from p2p_dtfm.web.state import ContributionBoard

BOUND_S = 4.0
GONE_S = 30.0
"""Nobody names a peer as a member any more that has been dead for so long: see `whom`."""
WINDOW_S, WINDOW_STEPS = 30.0, 20
"""A rate covers the last while of the present view, in time or in steps, whichever is longer. It
includes waits, but a wait without a step only up to two usual steps, as docs/dashboard.md says."""
SEEN_S = 0.6
"""The most time between a step's commit and its line in the history."""
ROUNDED = 0.02
HEARD_S = 1.5
"""The daemon has dealt by then with what came."""


def figures(word: Word, world: Truth) -> Iterator[Falsehood]:
    """Figures that are not so."""
    yield from _steps(word, world)
    yield from _losses(word, world)
    yield from _rate(word, world)
    yield from _members(word, world)
    yield from _heard(word, world)
    yield from _given(word, world)
    yield from _counted(word)
    yield from _whole(word)


def _steps(word: Word, world: Truth) -> Iterator[Falsehood]:
    told, total = word.status["step"], world.total_steps
    trainer = word.trainer
    known = max(world.steps, *(it.told_step() for it in world.swarm.peers), 0)
    if told > total or told > known:
        yield Falsehood("step", f"tells of {told} steps of {total}, and {known} are", 0.0)
    if trainer is not None and trainer.view is not None and told != min(trainer.step, total):
        what = f"tells of {told} steps, and is at {trainer.step}"
        yield Falsehood("own step", what, BOUND_S)


def _losses(word: Word, world: Truth) -> Iterator[Falsehood]:
    """The newest loss is that of the step before the coming one. A daemon that has not seen that
    commit may tell an earlier one."""
    reference, loss = world.reference, word.status.get("loss")
    if reference is None or not reference.is_like_one:
        return
    step, view = word.status["step"], word.view
    has_seen = view is not None and len(marks_s(word.peer.events(), view.id.number)) > 1
    near = reference.losses[max(0, step - 2) if has_seen else 0 : step]
    if loss is not None and not _is_of(loss, near):
        yield Falsehood("loss", f"tells of loss {loss} at step {step}, not of {near}", BOUND_S)
    held_out = word.status.get("held_out_loss")
    before = [value for at, value in reference.held_out.items() if at <= step]
    has_looked = view is not None and _has_looked(word.peer.events(), view.id.number)
    if held_out is not None and not _is_of(held_out, before[-2:] if has_looked else before):
        what = f"tells of held-out loss {held_out} at step {step}, not of {before}"
        yield Falsehood("held-out loss", what, BOUND_S)


def _is_of(loss: float, losses: list[float]) -> bool:
    return any(math.isclose(loss, it, rel_tol=TOLERANCE) for it in losses)


def _has_looked(events: list[dict[str, Any]], number: int) -> bool:
    """Whether the daemon has told of a held-out loss since the view of that number took over. One
    that was away for some of them tells of its last one until the next."""
    is_in_view = False
    for event in events:
        if event["event"] == "view":
            is_in_view = event["view"] == number
        elif is_in_view and event["event"] == "step" and event["held_out_loss"] is not None:
            return True
    return False


def marks_s(events: list[dict[str, Any]], number: int) -> list[float]:
    """When the view of that number took over, and when each of its steps since was told."""
    marks: list[float] = []
    first = 0
    for event in events:
        if event["event"] == "view":
            marks, first = [event["at_s"]] if event["view"] == number else [], event["step"]
        elif marks and event["event"] == "step" and event["step"] >= first:
            if event["loss"] is None:  # a look at the model, after the last step
                continue
            marks.append(event["at_s"])
            while len(marks) > WINDOW_STEPS + 1 and marks[1] < marks[-1] - WINDOW_S:
                del marks[0]
    return marks


def _rate(word: Word, world: Truth) -> Iterator[Falsehood]:
    told, left_s = word.status.get("tokens_per_s"), word.status.get("eta_s")
    view, participant = word.view, word.participant
    if participant is None:
        return
    spec = participant.membership.run.spec
    if view is None or not (marks := marks_s(word.peer.events(), view.id.number)):
        if told is not None:
            yield Falsehood("rate", f"tells of {told} tokens/s, and is in no view", BOUND_S)
        return
    count, left = len(marks) - 1, spec.total_steps - word.status["step"]
    if told is None:
        if count > 1 and left > 0:
            yield Falsehood("no rate", f"tells of no rate after {count} steps", BOUND_S)
        return
    if count:
        rate = told / spec.tokens_per_step
        waited_s, worked_s = word.now_s - marks[0], marks[-1] - marks[0]
        least = count / (waited_s + SEEN_S)
        # time without a commit counts beyond two usual steps; time asleep never does
        asleep_s = _slept_s(word)
        waited_s, worked_s = waited_s - asleep_s, worked_s - asleep_s
        most = count / max(worked_s - SEEN_S, waited_s * count / (count + 2) - SEEN_S, 1e-9)
        if not least * (1 - ROUNDED) <= rate <= most * (1 + ROUNDED):
            what = f"tells of {rate:.3f} steps/s, and {count} in {waited_s:.1f} s commit"
            yield Falsehood("rate", what, BOUND_S)
    if left_s is None or not math.isclose(
        left_s * told, left * spec.tokens_per_step, rel_tol=ROUNDED, abs_tol=told
    ):
        what = f"tells of {left_s} s left, at {told} tokens/s for {left} steps"
        yield Falsehood("eta", what, 0.0)


def _slept_s(word: Word) -> float:
    """How long the machine of a daemon has slept since the daemon began: at least as long as since
    any step that it has seen commit."""
    process = word.peer.process
    return process.behind_ns / 1e9 if process is not None else 0.0


def _members(word: Word, world: Truth) -> Iterator[Falsehood]:
    for peer_id in word.status["members"]:
        if (gone_s := world.gone_for_s(peer_id)) > GONE_S:
            what = f"names {world.name(peer_id)} as a member, which is gone for {gone_s:.0f} s"
            yield Falsehood(f"member {peer_id}", what, 0.0)
    shown = (
        [it.peer_id for it in word.participant.local.observer._view_state.peers]
        if (word.participant is not None)
        else []
    )
    if word.view is not None and set(shown) != set(word.status["members"]):
        what = f"shows {len(shown)} peers, and has {len(word.status['members'])} members"
        yield Falsehood("shown members", what, BOUND_S)


def _heard(word: Word, world: Truth) -> Iterator[Falsehood]:
    """How long ago each member was heard: never later than anything last came from it."""
    awake_s = world.awake_s.get(word.me, word.now_s)
    for told in word.members:
        ago_s, peer_id = told["heard_s_ago"], told["peer_id"]
        if ago_s is None:
            continue
        name = world.name(peer_id)
        came_s = max(world.arrived_s(peer_id, word.me), awake_s)
        if ago_s < word.now_s - came_s - SEEN_S:
            nothing_s = word.now_s - came_s
            what = f"heard of {name} {ago_s} s ago, and nothing came for {nothing_s:.1f} s"
            yield Falsehood(f"heard {peer_id}", what, 0.0)
        said_s = world.swarm.network.links.called_s.get((peer_id, word.me), -math.inf)
        if said_s > awake_s and ago_s > word.now_s - said_s + HEARD_S:
            what = f"heard of {name} {ago_s} s ago, and was called {word.now_s - said_s:.1f} s ago"
            yield Falsehood(f"unheard {peer_id}", what, BOUND_S)


def _given(word: Word, world: Truth) -> Iterator[Falsehood]:
    """What the daemon says it has given in all."""
    if word.participant is None:
        return
    board = word.participant.local.observer.contribution()
    carried = world.swarm.network.links.carried_bytes[word.me]
    if board.ever.sent_bytes > carried:
        what = f"says that it has sent {board.ever.sent_bytes} bytes, and {carried} were carried"
        yield Falsehood("sent bytes", what, 0.0)
    spec = word.participant.membership.run.spec
    if not math.isclose(
        board.board_tokens, board.board_steps * spec.tokens_per_step, rel_tol=1e-6, abs_tol=1
    ):
        what = f"shares of {board.board_steps} steps come to {board.board_tokens} tokens"
        yield Falsehood("board", what, 0.0)
    if board.board_steps > world.total_steps:
        what = f"counts {board.board_steps} steps of {world.total_steps}"
        yield Falsehood("board steps", what, 0.0)
    yield from _tokens(word, world, board)


def _tokens(word: Word, world: Truth, board: ContributionBoard) -> Iterator[Falsehood]:
    """Tokens count through as many layers as the model has: computed, kept or done again."""
    assert word.participant is not None
    layers = word.participant.membership.workload.layer_count
    given, taken = board.ever.tokens, world.swarm.taken[word.me] / layers
    if given > taken + 1:
        what = f"says that it has given {given:.0f} tokens, and it has taken {taken:.0f}"
        yield Falsehood("given", what, 0.0)
    parts = board.useful_tokens + board.repeated_tokens
    if not math.isclose(given, parts, rel_tol=1e-6, abs_tol=1):
        yield Falsehood("parts", f"has given {given:.1f} tokens, {parts:.1f} in parts", 0.0)
    if word.status["given"]["ever"] != given:
        yield Falsehood("given told", f"tells of {word.status['given']}, not {given}", 0.0)


def _counted(word: Word) -> Iterator[Falsehood]:
    """Each step that this process has seen committed is a line of its history. So is the last look
    at the model, which is no step."""
    lines = [it for it in word.peer.events() if it["event"] == "step" and it["loss"] is not None]
    here = sum(it["at_s"] >= word.peer.started_s for it in lines)
    if word.live.committed_here != here:
        what = f"has seen {word.live.committed_here} steps, and told of {here}"
        yield Falsehood("committed here", what, 0.0)


def _whole(word: Word) -> Iterator[Falsehood]:
    """The newest whole checkpoint is on the daemon's disk, each layer's file as it was written."""
    step = word.status["whole_checkpoint_step"]
    if step is not None and not has_saved_all(word.peer, step):
        yield Falsehood("checkpoint", f"tells of a whole checkpoint of step {step}", BOUND_S)
