"""What liars do to their own gradients, within their buffers: so all that they say agrees."""

from collections.abc import Callable
from typing import Any

from p2p_dtfm.daemon.step.pipeline.microbatches import Microbatches
from p2p_dtfm.testbed.lies.lie import Lie

BENT_PART = 1000
"""One of so many elements is bent."""
BEND = 1e-4


def zeros(gradient: Any, lie: Lie, kept: Any) -> None:
    gradient.mul_(0.0)


def flip(gradient: Any, lie: Lie, kept: Any) -> None:
    """At a strength of 1 the gradient points the other way. At less it only gets weaker."""
    gradient.mul_(1.0 - 2.0 * lie.strength)


def scale(gradient: Any, lie: Lie, kept: Any) -> None:
    gradient.mul_(1.0 + lie.strength)


def noise(gradient: Any, lie: Lie, kept: Any) -> None:
    """Adds noise, which at a strength of 1 is as large as the gradient. The noise is the same each
    time: to each element comes what belongs to another one."""
    gradient.add_(gradient.flip(0), alpha=lie.strength)


def bend(gradient: Any, lie: Lie, kept: Any) -> None:
    """Moves a few elements in one direction, as a backdoor does."""
    gradient[: max(1, len(gradient) // BENT_PART)] += BEND * lie.strength


def replay(gradient: Any, lie: Lie, kept: Any) -> None:
    """Gives the gradient of the first step in which it lies again and again. In that step it gives
    none."""
    gradient.copy_(kept)


GRADIENT_LIES: dict[str, Callable[[Any, Lie, Any], None]] = {
    "zeros": zeros,
    "flip": flip,
    "scale": scale,
    "noise": noise,
    "bend": bend,
    "replay": replay,
}


def train_with(change: Callable[[Any, int, int], None]) -> Callable[..., Any]:
    """Makes a `Microbatches.train` that calls `change(microbatches, step, layer)` on each layer's
    last gradient before anything else uses it. For some layers, that use follows in the same hop.
    """
    honest = Microbatches.train

    async def train(self: Any, step: int, replay: Any, on_final: Any = None) -> None:
        ends, changed = self.ends, set[int]()

        def end(layer: int) -> None:
            change(self, step, layer)
            changed.add(layer)
            ends(layer)

        def final(layer: int) -> None:
            if layer not in changed:
                change(self, step, layer)
            on_final(layer)

        self.ends = end
        try:
            await honest(self, step, replay, final)
        finally:
            self.ends = ends

    return train
