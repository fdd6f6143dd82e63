"""Text that the model writes as it learns: one fixed prompt, 80 tokens after each evaluation.

A peer that has the whole model writes with it for its own page; any other writes with the newest
whole checkpoint. Writing takes a hundredth of the time at most. It goes on on the thread that sums
gradients, a token at a time, so that no step waits for more than one token.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.ports import now
from p2p_dtfm.train.model.generate import GenerationTokenizer, written_by
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.model_copy import TextModel, copied_layer, copied_model
from p2p_dtfm.web.state import Sample, Samples

TOKENS = 80
PART_OF_TIME = 0.01
LONGEST_S = 5.0
"""A text ends where it is after this time."""
MODEL_LIMIT_BYTES = 1 << 30
"""Bytes of parameters: a larger model is not copied beside the one that is trained."""
KEPT = 200
"""How many texts are kept; of more, every second one goes."""

log = logging.getLogger("p2p_dtfm")


@dataclass
class Budget:
    """The time for texts. One text may exceed it, and the next ones wait for that."""

    begun_s: float
    spent_s: float = 0.0

    def may_begin(self, now_s: float) -> bool:
        return self.spent_s <= PART_OF_TIME * (now_s - self.begun_s)


@dataclass
class ModelSource:
    """Where the model is to be had. `states` gives the layers here, `whole_step` the step of the
    newest whole checkpoint, and `load(layer, step)` a layer of a checkpoint."""

    spec: RunSpec
    states: Callable[[], Mapping[int, LayerState]]
    whole_step: Callable[[], int | None]
    load: Callable[[int, int], Awaitable[LayerState]]
    parameter_bytes: int


@dataclass
class SampleWriter:
    """Call `evaluated` after each held-out evaluation; `show` gets all samples."""

    model: ModelSource
    tokenizer: GenerationTokenizer
    compute: Compute
    show: Callable[[Samples], None]
    samples: Samples = field(default_factory=Samples)
    _budget: Budget = field(default_factory=lambda: Budget(now.monotonic_s()))
    _writing: asyncio.Task[None] | None = None

    def evaluated(self, step: int, held_out_loss: float) -> None:
        """Write a text. It is skipped, and that is said, where the last text is not written yet or
        time is short. After the last step time is never short."""
        is_last = step >= self.model.spec.total_steps
        if self.model.spec.layers:
            self._skip("layers that a run lists need not write text")
        elif self._writing is not None and not self._writing.done():
            self._skip("the one before is still being written")
        elif not is_last and not self._budget.may_begin(now.monotonic_s()):
            self._skip("writing takes a hundredth of the time at most")
        elif self.model.parameter_bytes > MODEL_LIMIT_BYTES:
            self._skip("the model is too large to be copied beside training")
        else:
            self._writing = asyncio.create_task(self._write(step, held_out_loss))
            self._writing.add_done_callback(_say_bug)

    async def finished(self) -> None:
        """Wait until the text under way is written, or has taken too long."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=LONGEST_S)

    async def write_last(self, step: int) -> None:
        """The run is complete: write a text with the whole model, unless that is written. There is
        time now, but not for ever."""
        await self.finished()
        if self.model.spec.layers:
            return
        if not self.samples.written or self.samples.written[-1].step < step:
            self._writing = asyncio.create_task(self._write(step, None))
            self._writing.add_done_callback(_say_bug)
            await self.finished()

    def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()

    def _skip(self, why: str) -> None:
        self._tell(note=f"none was written at the last evaluation: {why}")

    async def _write(self, step: int, held_out_loss: float | None) -> None:
        states = dict(self.model.states())
        found, took_s = await self.compute.run(_copied, self.model.spec, states)
        self._budget.spent_s += took_s
        if found is None:
            found = await self._of_checkpoint()
            if found is None:
                return
        of_step, model = found
        text = await self._text(model)
        loss = held_out_loss if abs(of_step - step) <= 1 else None
        before = [it for it in self.samples.written if it.step < of_step]
        written = (*before, Sample(of_step, text, loss))
        self._tell(written=written[::-2][::-1] if len(written) > KEPT else written)
        log.debug("after %s the model writes %r", counted(of_step, "step"), text)

    async def _of_checkpoint(self) -> tuple[int, TextModel] | None:
        step, begun_s = self.model.whole_step(), now.monotonic_s()
        newest = self.samples.written[-1].step if self.samples.written else -1
        if step is None or step <= newest:
            self._skip("no peer here has the whole model, nor is there a new whole checkpoint")
            return None
        layers: TextModel = []
        try:
            for layer in range(layer_count(self.model.spec)):
                state = await self.model.load(layer, step)
                layers.append(await self.compute.run_beside(copied_layer, self.model.spec, state))
        except (UserError, OSError) as error:
            self._skip(f"the checkpoint of step {step} cannot be read: {error}")
            return None
        finally:
            self._budget.spent_s += now.monotonic_s() - begun_s
        return step, layers

    async def _text(self, model: TextModel) -> str:
        spec, spent_s = self.model.spec, 0.0
        pieces = written_by((spec, model), self.tokenizer, self._prompt, TOKENS)
        text = ""
        while spent_s < LONGEST_S:
            piece, took_s = await self.compute.run_beside(_next, pieces)
            spent_s += took_s
            if piece is None:
                break
            text += piece
        self._budget.spent_s += spent_s
        return text

    @property
    def _prompt(self) -> str:
        """A beginning that looks like the data."""
        is_code = self.model.spec.data.source == "python-standard-library"
        return "def " if is_code else "The "

    def _tell(self, written: tuple[Sample, ...] | None = None, note: str = "") -> None:
        kept = self.samples.written if written is None else written
        self.samples = Samples(self._prompt, kept, note)
        self.show(self.samples)


def _copied(
    spec: RunSpec, states: Mapping[int, LayerState]
) -> tuple[tuple[int, TextModel] | None, float]:
    """The model, if all of it is here, and how long the copy took."""
    begun_s = now.monotonic_s()
    return copied_model(spec, states), now.monotonic_s() - begun_s


def _next(pieces: Iterator[str]) -> tuple[str | None, float]:
    """The next piece of text, and how long it took."""
    begun_s = now.monotonic_s()
    return next(pieces, None), now.monotonic_s() - begun_s


def _say_bug(task: asyncio.Task[None]) -> None:
    """Training goes on without the text, but the bug is logged."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("bug while writing a sample", exc_info=error)
