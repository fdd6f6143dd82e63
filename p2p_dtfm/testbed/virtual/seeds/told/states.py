"""Where a daemon says that it stands: each state is what it is said to be."""

import re
from collections.abc import Callable, Iterator

from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.testbed.virtual.seeds.told.world import Falsehood, Truth, Word

BOUND_S = 4.0
"""A daemon tells a new state in its next turn. An update of the states, a file or a plan may come
before that."""


def states(word: Word, world: Truth) -> Iterator[Falsehood]:
    """What is false in the daemon's state and reason."""
    is_so = _MEANS.get(word.state)
    if is_so is not None and not is_so(word, world):
        yield Falsehood(f"is {word.state}", f"says that it is {_told(word)}", BOUND_S)
    if _takes_steps(word) and word.state not in _TAKES_STEPS:
        yield Falsehood("is not training", f"takes steps, and says {_told(word)}", BOUND_S)
    yield from _reasons(word, world)


def _reasons(word: Word, world: Truth) -> Iterator[Falsehood]:
    if word.state == State.TRAINING:
        yield from _training(word)
    if word.state == State.SYNCING:
        yield from _syncing(word)
    for beginning, is_so in _REASONS.items():
        if word.reason.startswith(beginning) and not is_so(word):
            yield Falsehood(f"says {beginning}", f"says {_told(word)}", BOUND_S)


def _training(word: Word) -> Iterator[Falsehood]:
    """The step in the reason is the one under way."""
    told = word.reason.removeprefix("step ").split(" of ")[0].replace(",", "")
    trainer = word.trainer
    if trainer is not None and told.isdecimal() and abs(int(told) - trainer.step) > 1:
        what = f"says {_told(word)}, and is at step {trainer.step}"
        yield Falsehood("step in the reason", what, BOUND_S)


def _syncing(word: Word) -> Iterator[Falsehood]:
    """As many layers are late as the reason says."""
    trainer, told = word.trainer, _LATE.match(word.reason)
    if trainer is None or told is None or word.plan is None:
        return
    late = len(trainer.late(word.plan.layers_of(word.me)))
    if late != int(told[1]):
        yield Falsehood("late layers", f"says {_told(word)}, and {late} are late", BOUND_S)


_LATE = re.compile(r"waits for (\d+) layers? as of step")


def _told(word: Word) -> str:
    return f"{word.state}: {word.reason}"


def _has_stage(word: Word) -> bool:
    return word.plan is not None and word.plan.stage_of(word.me) is not None


def _is_training(word: Word, world: Truth) -> bool:
    """It has a stage in a view whose steps go on."""
    trainer = word.trainer
    is_left = trainer is not None and trainer.step <= world.total_steps
    return _has_stage(word) and is_left and not word.is_stopped


def _is_spare(word: Word, world: Truth) -> bool:
    return word.plan is not None and not _has_stage(word)


def _is_outside(word: Word, world: Truth) -> bool:
    """It is in no view."""
    return word.view is None


def _syncs(word: Word, world: Truth) -> bool:
    """It is in a view, or is to be."""
    agreement = word.agreement
    if agreement is None:
        return False
    coming = (agreement.view, agreement.next_view, agreement.attempt)
    return any(it is not None for it in coming)


def _is_told_to_leave(word: Word, world: Truth) -> bool:
    daemon = word.peer.daemon
    return daemon is not None and (daemon.is_to_leave or daemon.pause_reason is not None)


_MEANS: dict[str, Callable[[Word, Truth], bool]] = {
    State.STARTING: _is_outside,
    State.MEASURING: _is_outside,
    State.JOINING: _is_outside,
    State.SYNCING: _syncs,
    State.TRAINING: _is_training,
    State.SPARE: _is_spare,
    State.DONE: lambda word, world: world.is_complete,
    State.LEAVING: _is_told_to_leave,
}
_TAKES_STEPS = (State.TRAINING, State.LEAVING, State.DONE, State.STOPPED)


def _has_refused(word: Word) -> bool:
    return word.peer.disk.is_full or word.peer.disk.refused > 0


def _is_to_start_anew(word: Word) -> bool:
    return word.is_stopped or bool(word.trainer is not None and word.trainer.restarts)


def _takes_steps(word: Word) -> bool:
    """It computes a step at this moment."""
    participant = word.participant
    return participant is not None and participant.trainer._steps.computes and _has_stage(word)


def _waits_for_a_plan(word: Word) -> bool:
    return word.view is not None and word.plan is None


_REASONS: dict[str, Callable[[Word], bool]] = {
    "a failure: ": _is_to_start_anew,
    "a data shard cannot be written": _has_refused,
    "this start cannot be noted": _has_refused,
    "no member of run ": lambda word: word.view is None,
    "waits 15 s at most": lambda word: word.view is None,
    "rejoins: ": lambda word: word.view is None,
    "no peer has ": _waits_for_a_plan,
}
"""Whether a reason is true, by how it begins."""
