"""Torch's compiler stays where it is when layers are made, timed and trained: loading it would cost
each start a second, and 35 MB. (Values drawn without a device, as on `meta`, load it, and so does
`torch.autograd.backward` of a gradient, for shapes that are not known: `passed_back`.)"""

import subprocess
import sys

STARTS = """
import sys
import torch
from p2p_dtfm.train.model.gpt import build_layer, initialise_layer, layer_entries
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.measure import measure_device
from p2p_dtfm.train.stage.stage_runner import StageRunner
from tests.core.builders import run_spec
spec = run_spec()
for layer in (0, 1, spec.model.layers + 1):
    layer_entries(spec, layer)
    initialise_layer(build_layer(spec, layer), spec, layer)
measure_device(spec, threads=1)
runner = StageRunner(spec, {1: LayerState.genesis(spec, 1)})
entry = torch.ones(spec.batch.microbatch, spec.model.context, spec.model.width)
runner.forward(0, entry, None)
runner.backward(0, torch.ones_like(entry))
print(*sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


def test_layers_are_made_timed_and_trained_without_it() -> None:
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
