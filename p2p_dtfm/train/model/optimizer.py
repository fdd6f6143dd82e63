"""What an update is made with: the learning rate, the norm, the clipping."""

import math
from typing import NamedTuple

from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.updates.adam_w import rounded

_CLIP_EPSILON = 1e-6


def learning_rate(spec: RunSpec, step: int) -> float:
    """Rate of the update that turns state `step` into state `step + 1`.

    Linear warm-up to the peak, then half a cosine down to the final rate (Loshchilov and Hutter
    2017, "SGDR", equation 5, one cycle). With `wsd` the rate stays at the peak up to the last
    steps, in which it falls in a straight line. It is rounded, so that C libraries whose cosines
    differ in the last bit still agree.
    """
    return _scheduled_rate(spec, step, spec.total_steps)


def inner_learning_rate(spec: RunSpec, step: int, inner_step: int) -> float:
    """The rate of an inner step, where `sync.mode` is local. It is the same schedule over all inner
    steps of the run, one after the other; warm-up counts inner steps."""
    inner_steps = spec.sync.inner_steps
    assert 0 <= inner_step < inner_steps, inner_step
    return _scheduled_rate(spec, step * inner_steps + inner_step, spec.total_steps * inner_steps)


class Update(NamedTuple):
    """How a committed step's reduced gradient enters the state: what `LayerState.apply` takes."""

    clip_scale: float
    learning_rate: float


def update_of(spec: RunSpec, step: int, gradient_norm: float) -> Update:
    """The update of a committed step, the same at every holder and follower. Differences of local
    steps are not clipped."""
    if spec.sync.mode == "local":
        return Update(1.0, spec.sync.outer_learning_rate)
    return Update(clip_scale(gradient_norm, spec.optimizer.clip_norm), learning_rate(spec, step))


def _scheduled_rate(spec: RunSpec, step: int, total_steps: int) -> float:
    assert step >= 0, step
    optimizer = spec.optimizer
    peak, final, warmup = (
        optimizer.peak_learning_rate,
        optimizer.final_learning_rate,
        optimizer.warmup_steps,
    )
    if step < warmup:
        return rounded(peak * (step + 1) / warmup)
    if optimizer.schedule == "wsd":
        falling = optimizer.decay_steps or max(1, total_steps // 5)
        left = min(1.0, max(0, total_steps - step) / falling)
        return rounded(final + (peak - final) * left)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return rounded(final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def clip_scale(global_norm: float, clip_norm: float) -> float:
    """Factor for all gradients that keeps their global norm within `clip_norm`.

    Pascanu et al. 2013, algorithm 1, with the epsilon of `torch.nn.utils.clip_grad_norm_`.
    """
    return min(1.0, clip_norm / (global_norm + _CLIP_EPSILON))


def apply_outcome(
    spec: RunSpec, state: LayerState, gradient: Tensor, step: int, gradient_norm: float
) -> None:
    """Make the update that every holder and follower of a layer makes for a committed step."""
    assert state.version == step, (state.layer, state.version, step)
    state.apply(gradient, *update_of(spec, step, gradient_norm))


def replay_outcome(
    spec: RunSpec, state: LayerState, gradient: Tensor, step: int, gradient_norm: float
) -> None:
    """Make the same update from a received gradient, unless it is made already.

    A cancelled replay may still be under way in the compute thread.
    """
    if state.version <= step:
        apply_outcome(spec, state, gradient, step, gradient_norm)
