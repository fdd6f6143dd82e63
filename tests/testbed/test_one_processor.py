"""Seeds have the same bits on all machines, whatever vector units these have."""

import os
import subprocess
import sys

import pytest
import torch

from p2p_dtfm.testbed.virtual.seeds.surroundings.one_processor import one_name
from p2p_dtfm.train.stage.replay.arithmetic import arithmetic_name

STRAINED = """
import hashlib, torch
from torch.nn import functional as f
if {alike}:
    from p2p_dtfm.train.stage.replay.any_processor import compute_alike
    compute_alike()
torch.set_num_threads(1)
draws = torch.Generator().manual_seed(7)
rows, weight = (torch.randn(n, 65, generator=draws).requires_grad_() for n in (257, 191))
products = f.linear(f.layer_norm(rows, (65,)), weight)
loss = f.cross_entropy(f.gelu(products).softmax(1) @ products.T.exp().log1p(), torch.arange(257))
loss.backward()
few = (rows.bfloat16() @ weight.bfloat16().T).float()
every = torch.cat([it.detach().flatten() for it in (rows.grad, weight.grad, loss, few)])
print(hashlib.sha256(every.numpy().tobytes()).hexdigest())
"""
OF_AN_EPYC = "8a68f6c97248fe53bc55eada2a5a8bfbf69312a18d6124a7187332a4b70f938a"
"""What these come to on an AMD EPYC with AVX2, by torch 2.13.0."""


def test_their_arithmetic_has_one_name() -> None:
    processor = torch.device("cpu")
    own = arithmetic_name(processor)
    with one_name():
        assert arithmetic_name(processor) not in (own, "")
    assert arithmetic_name(processor) == own


@pytest.mark.nightly
def test_the_bits_are_those_of_another_machine() -> None:
    assert bits() == OF_AN_EPYC
    others = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert bits(others) == OF_AN_EPYC, "whatever somebody has set"


@pytest.mark.nightly
@pytest.mark.skipif(
    "AVX" not in torch.backends.cpu.get_cpu_capability(), reason="this machine has none"
)
def test_without_that_they_would_be_the_machines_own() -> None:
    assert bits(alike=False) != OF_AN_EPYC


def bits(settings: dict[str, str] | None = None, alike: bool = True) -> str:
    """The digest of what a model's operations come to in a process with these settings."""
    program = STRAINED.format(alike=alike)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **(settings or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()
