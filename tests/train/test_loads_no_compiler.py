"""Torch's compiler is not loaded when layers are made, timed and trained. Loading it, or the
computer algebra it reasons with, would cost each start a second, and 35 MB. (Values drawn without a
device, as on `meta`, load it.)"""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from p2p_dtfm.train.stage.device.given_gradient import backward_from

MAKES = """
from p2p_dtfm.train.model.gpt import build_layer, initialise_layer, layer_entries
for layer in (0, 1, spec.model.layers + 1):
    layer_entries(spec, layer)
    initialise_layer(build_layer(spec, layer), spec, layer)
"""
TIMES = """
from p2p_dtfm.train.stage.measure import measure_device
measure_device(spec, threads=1)
"""
TRAINS = """
import torch
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.stage_runner import StageRunner
last = spec.model.layers + 1
first, second = (
    StageRunner(spec, {layer: LayerState.genesis(spec, layer) for layer in held})
    for held in (range(2), range(2, last + 1))
)
tokens = torch.zeros(2, spec.model.context, dtype=torch.long)
second.forward(0, first.forward(0, tokens), tokens)
first.backward(0, second.backward(0))
"""
DOES = {"makes": MAKES, "times": TIMES, "trains": TRAINS}
LOADED = """
import sys
print("NAME", *sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


def test_a_start_loads_neither_the_compiler_nor_its_algebra() -> None:
    """The steps run one after the other, since what is loaded stays."""
    program = "from tests.core.builders import run_spec\nspec = run_spec()\n"
    program += "".join(does + LOADED.replace("NAME", name) for name, does in DOES.items())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(DOES), "what has loaded some of it, and what"


@pytest.mark.parametrize("shape", [(), (3, 4)])
def test_gradients_are_those_that_torch_hands_on(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    values, gradient = (torch.randn(shape, generator=generator) for _ in range(2))

    def gradient_by(backward: object) -> Tensor:
        entry = values.clone().requires_grad_()
        result = (entry * 1.7).tanh()
        with torch.no_grad():
            backward(result, gradient)  # type: ignore[operator]
        assert entry.grad is not None
        return entry.grad

    assert torch.equal(gradient_by(backward_from), gradient_by(torch.autograd.backward))
