"""What other peers' transcripts show of steps that this peer has not seen.

A transcript may be a whole invention, with one liar signing for all its members. But a peer that
takes part knows the lineage of its own states, which names every step before. Only steps that lead
there count.
"""

from collections.abc import Mapping
from typing import NamedTuple

from p2p_dtfm.core.commit.shares import shares_of
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.lineage import extend, unmarked
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Verify
from p2p_dtfm.core.transcript.checking import Checker, NotTrue, Step
from p2p_dtfm.core.transcript.entries import Began, Committed, Entry, TookOver, entry_of

LINE_LIMIT_BYTES = 8 << 20
"""Several times what a view of 1,024 members takes. What is made of a line takes up to ten times as
much. A line of 64 MiB, which is all that is asked for of one transcript, would take 665 MB."""


class Led(NamedTuple):
    """A step that all its stage-holders have signed. `base`: the lineage from which it starts."""

    step: int
    base: str
    shares: Mapping[str, int]
    """By stage-holder: its share of the step, in tokens times layers."""


class EarlierSteps:
    """Reads one transcript in pieces, as it comes. Afterwards `led` has its steps, each by the
    lineage to which it led. Steps that were given up later are among them."""

    def __init__(self, verify: Verify, spec: RunSpec) -> None:
        self.led: dict[str, Led] = {}
        self.first_step: int | None = None
        """The step from which on the transcript tells; None: that has not come yet."""
        self._spec = spec
        self._checker = Checker(verify)
        self._begun: list[bytes] = []
        """Pieces of a line whose end has not come."""
        self._begun_bytes = 0
        self._shares: Mapping[str, int] = {}

    def take(self, content: bytes) -> None:
        """Takes the next piece. Of a damaged line only that line is lost. Raises `NotTrue`."""
        *ends, rest = content.split(b"\n")
        for end in ends:
            self._begin_line(end)
            line = b"".join(self._begun)
            self._begun, self._begun_bytes = [], 0
            if not line.strip():
                continue
            try:
                entry = entry_of(line)
            except PeerFault:
                continue
            self._take(entry)
        self._begin_line(rest)

    def _begin_line(self, part: bytes) -> None:
        """Adds a piece of a line. Raises `NotTrue` if the line gets too long."""
        self._begun.append(part)
        self._begun_bytes += len(part)
        if self._begun_bytes > LINE_LIMIT_BYTES:
            raise NotTrue(f"a line of more than {LINE_LIMIT_BYTES} bytes")

    def _take(self, entry: Entry) -> None:
        if isinstance(entry, Began) and entry.run_spec != self._spec.canonical_bytes():
            raise NotTrue("it is of another run")
        self._checker.take(entry)
        if isinstance(entry, TookOver):
            self._shares = self._shares_in(entry)
            if self.first_step is None:
                self.first_step = entry.step
        if isinstance(entry, Committed):
            for number, step in self._checker.steps.items():
                self._add(number, step)
            self._checker.steps.clear()  # their statements are no longer needed

    def _shares_in(self, entry: TookOver) -> Mapping[str, int]:
        plan, spec = entry.plan, self._spec
        if not isinstance(plan, Plan):
            return {}
        return shares_of(plan, spec.batch.microbatch * spec.model.context)

    def _add(self, number: int, step: Step) -> None:
        base = next(iter(step.said.values())).base
        led_to = extend(base, number, step.view.id, step.outcome.digest)
        self.led[unmarked(led_to)] = Led(number, base, self._shares)


def leading_to(led: Mapping[str, Led], known: Mapping[int, str]) -> dict[int, Mapping[str, int]]:
    """By step that made this peer's states: who computed it, and the share of each. `known`: by
    number of steps, the lineage of its states after them."""
    found: dict[int, Mapping[str, int]] = {}
    for length, lineage in sorted(known.items(), reverse=True):
        step = led.get(unmarked(lineage))
        while step is not None and step.step == length - 1 and step.step not in found:
            found[step.step] = step.shares
            length, lineage = step.step, step.base
            step = led.get(unmarked(lineage))
    return found
