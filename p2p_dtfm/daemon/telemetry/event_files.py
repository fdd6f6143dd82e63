"""The run's figures as event files for TensorBoard, for those who asked for them."""

import importlib
import logging
from pathlib import Path
from typing import Any

from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.ports import now
from p2p_dtfm.ports.packages import how_to_install

FLUSH_EVERY_S = 2.0

log = logging.getLogger("p2p_dtfm")


class EventFiles:
    """Writes loss, held-out loss, gradient norm and tokens per second of each step in `directory`.

    Each start of a daemon adds a file; TensorBoard shows those of one directory as one run. Raises
    `UserError` if tensorboardX is missing or the directory cannot be written. The file is begun
    with the first step.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._files = importlib.import_module("tensorboardX.event_file_writer")
            self._events = importlib.import_module("tensorboardX.proto.event_pb2")
        except ImportError as error:
            raise UserError(
                "--tensorboard needs tensorboardX, which is not installed here",
                (how_to_install("tensorboardX"), "or leave out --tensorboard"),
            ) from error
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write TensorBoard's files to {directory}: {error.strerror}",
                "name a directory that you may write to: --tensorboard DIR",
            ) from error
        self._directory = directory
        self._writer: Any = None
        self._newest_step: int | None = None
        self._flushed_s = 0.0
        self._broken = False

    def step_committed(self, outcome: StepOutcome, tokens_per_s: float | None) -> None:
        """A full disk costs the figures, with a warning, not the training."""
        figures = {
            "loss": outcome.loss,
            "held_out_loss": outcome.held_out_loss,
            "gradient_norm": outcome.gradient_norm,
            "tokens_per_s": tokens_per_s,
        }
        event = self._events.Event(wall_time=now.wall_s(), step=outcome.step)
        for name, value in figures.items():
            if value is not None:
                event.summary.value.add(tag=name, simple_value=value)
        if self._broken or not event.summary.value:
            return
        try:
            self._write(event, outcome.step)
        except OSError as error:
            self._broken = True
            log.warning("no more figures for TensorBoard: %s", error)

    def _write(self, event: Any, step: int) -> None:
        if self._writer is None:
            self._writer = self._files.EventsWriter(str(self._directory / "events"))
        if self._newest_step is None or step <= self._newest_step:
            # what this file or an earlier one says of this step and later ones is repeated
            session = self._events.SessionLog(status=self._events.SessionLog.START)
            started = self._events.Event(wall_time=now.wall_s(), step=step, session_log=session)
            self._writer.write_event(started)
        self._newest_step = step
        self._writer.write_event(event)
        if now.monotonic_s() - self._flushed_s > FLUSH_EVERY_S:
            self._flushed_s = now.monotonic_s()
            self._writer.flush()

    def close(self) -> None:
        """Write what is still held back."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                log.warning("the last figures for TensorBoard are lost: %s", error)
