"""What a liar makes of its own gradients: in its buffers, so that all that it says agrees."""

from collections.abc import Callable
from typing import Any

from p2p_dtfm.daemon.step.pipeline.microbatches import Microbatches
from p2p_dtfm.testbed.lies.lie import Lie

BENT_PART = 1000
"""Of so many elements one is bent."""
BEND = 1e-4


def zeros(gradient: Any, lie: Lie, kept: Any) -> None:
    gradient.mul_(0.0)


def flip(gradient: Any, lie: Lie, kept: Any) -> None:
    """By a strength of 1 it points the other way; by less it is the weaker for it."""
    gradient.mul_(1.0 - 2.0 * lie.strength)


def scale(gradient: Any, lie: Lie, kept: Any) -> None:
    gradient.mul_(1.0 + lie.strength)


def noise(gradient: Any, lie: Lie, kept: Any) -> None:
    """Of the gradient's own size, by a strength of 1, and the same each time: to each element what
    belongs to another one."""
    gradient.add_(gradient.flip(0), alpha=lie.strength)


def bend(gradient: Any, lie: Lie, kept: Any) -> None:
    """One direction in a few elements, as a backdoor does."""
    gradient[: max(1, len(gradient) // BENT_PART)] += BEND * lie.strength


def replay(gradient: Any, lie: Lie, kept: Any) -> None:
    """That of the first step in which it lies, again and again; that one it leaves out."""
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
    """`Microbatches.train` in which `change(microbatches, step, layer)` comes to each layer's last
    gradient before anybody else does: of some what is to be done with it follows in the same hop.
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
