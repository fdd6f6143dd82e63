"""Fills the gaps of one transcript with steps from those of other members.

A step's Prepared name the lineage from which it starts, and that names every step before it. So of
another transcript only steps belong here that lead to what stands here already.
"""

from collections.abc import Iterable, Mapping, Sequence

from p2p_dtfm.core.protocol.lineage import epochs_of, extend, unmarked
from p2p_dtfm.core.transcript.checking import Checker, Step


def joined(checkers: Sequence[Checker]) -> tuple[Checker, int]:
    """Of transcripts of one run: the one that has come furthest (of equals the first), with the
    steps that it lacked; and how many those were. Steps of others that lead elsewhere are left out.

    So are its own, where what others have shows that they lead elsewhere: its writer was killed
    after a step that the others have done again, or has come over from another part of the swarm.
    """
    main = max(checkers, key=_how_far)
    led = _by_end(each.steps for each in checkers if each is not main)
    added = 0
    if not led:
        return main, added  # within one transcript all is in order
    for number in sorted(main.steps, reverse=True):
        at = number
        while at in main.steps and not _is_led_to(main.steps, at):
            found = led.get((at, unmarked(base_of(main.steps[at]))))
            at -= 1
            if found is None:
                main.steps.pop(at, None)
                break
            main.steps[at] = found
            added += 1
    return main, added


def _how_far(checker: Checker) -> tuple[int, int]:
    """How far a transcript has come. One of a later epoch has come further than one whose steps
    that epoch took back, however many these are."""
    newest = max(checker.steps, default=-1)
    takes_back = checker.spec is not None and checker.spec.audit.undo_steps > 0
    if newest < 0 or not takes_back:
        return 0, newest
    return epochs_of(base_of(checker.steps[newest])).number, newest


def _is_led_to(steps: Mapping[int, Step], number: int) -> bool:
    """Whether the step before this one is there, and leads to it."""
    before = steps.get(number - 1)
    return before is not None and end_of(number - 1, before) == unmarked(base_of(steps[number]))


def in_gaps(main: Checker, other: Checker) -> int:
    """How many of the steps that `main` lacks another transcript has. Nothing shows that they led
    to what stands in `main`, so they stay out: they may have been given up."""
    gaps = main.gaps  # which looks through all steps
    return sum(1 for it in other.steps for first, end in gaps if first <= it < end)


def differ_from(main: Checker, other: Checker) -> int | None:
    """The first step that both have and that is not the same; None if there is none. From there on
    nothing that is found of the one is so of the other. After the last step each view measures the
    model once more, and trains nothing: such entries are the same if they are of the same model."""
    for number in sorted(main.steps.keys() & other.steps.keys()):
        one, another = main.steps[number], other.steps[number]
        if one.outcome.loss is None and another.outcome.loss is None:
            is_same = unmarked(base_of(one)) == unmarked(base_of(another))
        else:
            is_same = end_of(number, one) == end_of(number, another)
        if not is_same:
            return number
    return None


def end_of(number: int, step: Step) -> str:
    """The lineage to which the step leads; the digest alone."""
    return unmarked(extend(base_of(step), number, step.view.id, step.outcome.digest))


def base_of(step: Step) -> str:
    """The lineage of the states from which the step starts: all who made it say the same."""
    return next(iter(step.said.values())).base


def _by_end(each: Iterable[Mapping[int, Step]]) -> dict[tuple[int, str], Step]:
    """Steps by where they lead: after how many steps, and to which lineage, the digest alone."""
    found = {}
    for steps in each:
        for number, step in steps.items():
            found[number + 1, end_of(number, step)] = step
    return found
