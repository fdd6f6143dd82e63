"""The script that measures a CUDA device, tried on the processor."""

import json
import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_swarm import swarm_figures


@pytest.mark.nightly
def test_it_runs_through_on_the_processor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--quick", "--json"])
    assert gpu.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["figures"] and not found["faults"]
    for name in ("gpt2-small", "gpt3-xl"):
        assert min(found[name]["tokens_per_s"].values()) > 0
    assert all(found["codecs"][name]["same_bytes"] for name in ("int8", "sparse", "sign"))
    assert found["replica"]["differ_by_step"] is None


def test_without_a_device_it_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == gpu.NO_DEVICE
    assert capsys.readouterr().out.strip().endswith("nothing was measured")


def test_what_differs_is_a_fault() -> None:
    row = {"same_bytes": True, "same_values": False}
    found = {
        "codecs": {"int8": row, "took_s": 1.0},
        "adam_w": {"same_bits": False},
        "replica": {"differ_by_step": 99},
        "recordings": {"same_bits": False},
        "swarm_fp32": {"fault": "no checkpoint was saved"},
        "memory_cap": {"refused": False},
    }
    assert len(gpu.faults_in(found)) == 6


@pytest.mark.nightly
def test_a_swarm_of_processors_has_the_losses_of_the_plain_loop() -> None:
    found = swarm_figures(torch.device("cpu"), "fp32", 6)
    assert "fault" not in found and all(found["stages"])
