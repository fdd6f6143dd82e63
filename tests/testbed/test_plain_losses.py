"""Which runs have the losses of one process, and which cannot have them."""

import pytest

from p2p_dtfm.testbed.plain_losses import why_not_plain
from tests.core.builders import run_spec

LOCAL = {"mode": "local", "inner_steps": 2}


def test_a_run_whose_replicas_add_everything_is_one_of_one_process() -> None:
    assert why_not_plain(run_spec()) == ""
    muon = {"peak_learning_rate": 1e-3, "kind": "muon"}
    assert why_not_plain(run_spec(optimizer=muon)) == "", "the plain loop has that, too"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sync": LOCAL}, 'sync.mode = "local"'),
        ({"sync": {"sums": "trimmed"}}, 'sync.sums = "trimmed"'),
        ({"codecs": {"reduction": "int8"}}, 'codecs.reduction = "int8"'),
        ({"codecs": {"activations": "subspace"}}, "codecs.activations"),
        ({"codecs": {"gradients": ["fp32", "bf16"]}}, "codecs.gradients"),
        ({"compute": {"precision": "bf16"}}, 'compute.precision = "bf16"'),
    ],
)
def test_what_the_plain_loop_does_otherwise_is_named(changes: dict[str, object], what: str) -> None:
    model = {"layers": 4, "width": 128, "heads": 4, "context": 48, "vocabulary": 256}
    batch = {"global_batch": 32, "microbatch": 4}
    assert what in why_not_plain(run_spec(model=model, batch=batch, **changes))
