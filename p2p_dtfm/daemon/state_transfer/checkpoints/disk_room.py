"""Whether this disk has room for the whole model, beside what this peer is to save of it next.

That is asked before any of the model is fetched. Else the model would fill up a disk that is too
small. What came of a file would go, and be asked for again, over this line and the others', for
ever. Meanwhile the peer could not save its own layers, of which nobody else may have a copy.
"""

import logging
from collections.abc import Collection
from functools import cached_property
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import bytes_text
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.telemetry.status import Troubles
from p2p_dtfm.ports import disk, now
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import state_bytes_limit

TROUBLE = "room"
FIRST_REST_S, LONGEST_REST_S = 2.0, 1800.0
"""How long to rest after the disk did not take a file, though it seemed to have room, as under a
quota."""

log = logging.getLogger("p2p_dtfm.checkpoints")


class NoRoom(Exception):
    """There is no room, which was said when that began."""


class DiskRoom:
    """`saves`: the layers that this peer writes at the next checkpoint."""

    def __init__(self, root: Path, spec: RunSpec, troubles: Troubles) -> None:
        self._root = root
        self._spec = spec
        self._troubles = troubles
        self.saves: Collection[int] = ()
        self.is_short = False
        """Whether there is no room; also where the disk seems to have room, and has refused a
        file."""
        self._rest_s = FIRST_REST_S
        self._again_s: float | None = None
        """When the disk may be asked to take a file once more."""

    def require(self, missing: Collection[int]) -> None:
        """Raises `NoRoom` unless there is room for all these layers, and for the largest of them
        twice: it is copied to its place."""
        if self._again_s is not None and now.monotonic_s() < self._again_s:
            raise NoRoom
        sizes = [self._sizes[layer] for layer in missing]
        own_bytes = sum(self._sizes[layer] for layer in self.saves)
        needed_bytes = sum(sizes) + max(sizes, default=0) + own_bytes
        free_bytes = self._free_bytes(needed_bytes)
        if needed_bytes > free_bytes:
            more = bytes_text(needed_bytes - free_bytes, rounded_up=True)
            self._say("this disk has no room for the whole model", more)
            raise NoRoom
        if self._again_s is None:
            self.over()

    def refused(self, error: OSError | UserError) -> None:
        """The disk did not take a file that was fetched."""
        self._again_s = now.monotonic_s() + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        cause = error.cause if isinstance(error, UserError) else error.strerror or error
        what = f"the disk does not take the whole model: {cause}"
        self._say(what, "room", ", or make it writable")

    def took(self) -> None:
        """The disk took a file."""
        self._again_s, self._rest_s = None, FIRST_REST_S
        self.over()

    def over(self) -> None:
        """Nothing is wanted that the disk has no room for."""
        self.is_short = False
        self._troubles.over(TROUBLE)

    def _say(self, what: str, more: str, or_what: str = "") -> None:
        until = "until then it keeps what this peer saves itself"
        fix = f"free {more} on the disk of {self._root}{or_what}: {until}"
        if not self.is_short:
            log.warning("%s; %s", what, fix)
        self.is_short = True
        self._troubles.tell(TROUBLE, what, fix)

    def _free_bytes(self, unknown: int) -> int:
        try:
            return disk.free_bytes(self._root)
        except OSError:  # the fault shows when something is written
            return unknown

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(state_bytes_limit(self._spec, n) for n in range(layer_count(self._spec)))
