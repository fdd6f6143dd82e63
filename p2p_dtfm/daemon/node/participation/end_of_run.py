"""The last words of a run that is complete: thanks, a report, and what to do next."""

import asyncio
import logging

from p2p_dtfm.daemon.dashboard.report_file import FILE as REPORT_FILE
from p2p_dtfm.daemon.dashboard.report_file import last_words, next_commands, write_report
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.peers.run_source import Run
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.trainer.sample_writer import SampleWriter
from p2p_dtfm.ports import now

WHOLE_LIMIT_S = 10.0
WHOLE_POLL_S = 0.1
"""How long the last words wait until all layers of the last step are on this disk."""
ROOM_POLL_S = 2.0
"""How often it is looked whether they have come after that, as over a slow line or to a disk that
had no room."""

log = logging.getLogger("p2p_dtfm")


class EndOfRun:
    """`done` is set once the trainer has taken the last step. A failure may cost that step after
    all."""

    def __init__(
        self,
        local: Local,
        run: Run,
        done: asyncio.Event,
        checkpoints: Checkpoints,
        samples: SampleWriter | None,
    ) -> None:
        self._local = local
        self._run = run
        self._done = done
        self._checkpoints = checkpoints
        self._samples = samples
        self._has_told = False
        self._lacks_model = False
        """Whether that was told of this disk: it had no room, or the model was on its way."""
        self._telling = asyncio.Lock()

    async def when_done(self) -> None:
        """Tell when the run is done. A daemon that ends with its run may end before. Where the
        model is not on this disk by then, tell once it is: who leaves before has an older one."""
        while not self._has_told or self._lacks_model:
            await self._done.wait()
            await self.tell()
            if self._lacks_model:
                await asyncio.sleep(ROOM_POLL_S)

    async def tell(self) -> None:
        """Tell once, and only of a run that is complete."""
        async with self._telling:
            if not self._done.is_set():
                return
            if not self._has_told:
                self._has_told = await self._tell()
            elif self._lacks_model and self._checkpoints.whole_step == self._run.spec.total_steps:
                self._tell_that_it_is_here()

    async def _tell(self) -> bool:
        """Returns whether the run was still complete when the words were due: a failure may have
        cost its last steps."""
        spec, observer = self._run.spec, self._local.observer
        end_s = now.monotonic_s() + WHOLE_LIMIT_S
        while self._checkpoints.whole_step != spec.total_steps and now.monotonic_s() < end_s:
            await asyncio.sleep(WHOLE_POLL_S)
        if self._done.is_set() and self._samples is not None:
            await self._samples.write_last(spec.total_steps)
        if not self._done.is_set():
            return False
        home, state = self._local.home, observer.state()
        path = home.run_directory(self._run.digest) / REPORT_FILE
        self._lacks_model = self._checkpoints.whole_step != spec.total_steps
        commands = () if self._lacks_model else self._next_commands()
        observer.ends_with(commands)
        written = await asyncio.to_thread(write_report, path, state, commands)
        for line in last_words(state, path if written else None, commands):
            log.info("%s", line)
        if self._is_missing(spec.total_steps):
            log.warning("the model of step %d is not on this disk", spec.total_steps)
        elif self._lacks_model:
            what = "the model of step %d is not whole on this disk yet: what it lacks is fetched"
            log.info(what, spec.total_steps)
        return True

    def _tell_that_it_is_here(self) -> None:
        self._lacks_model = False
        log.info("the model of step %d is on this disk now", self._run.spec.total_steps)
        commands = self._next_commands()
        self._local.observer.ends_with(commands)
        for command in commands:
            log.info("next: %s", command)

    def _next_commands(self) -> tuple[str, ...]:
        """What can be typed once the model is here. These commands take no model with listed
        layers, or whose ends others keep."""
        if self._run.spec.layers or self._checkpoints.withheld:
            return ()
        prompt = self._local.observer.state().samples.prompt or "def "
        return next_commands(self._local.home.root, prompt)

    def _is_missing(self, step: int) -> bool:
        """Whether this disk has no room for the model. Otherwise the model is here, or on its
        way."""
        return self._checkpoints.refused(step) or self._checkpoints.has_no_room(step)
