"""Torch's compiler stays where it is when layers are made: loading it would cost each start a
second, and 35 MB. (Values drawn without a device, as on `meta`, load it.)"""

import subprocess
import sys

STARTS = """
import sys
from p2p_dtfm.train.model.gpt import build_layer, initialise_layer, layer_entries
from tests.core.builders import run_spec
spec = run_spec()
for layer in (0, 1, spec.model.layers + 1):
    layer_entries(spec, layer)
    initialise_layer(build_layer(spec, layer), spec, layer)
sys.exit("torch._dynamo" in sys.modules)
"""


def test_layers_are_made_without_it() -> None:
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
