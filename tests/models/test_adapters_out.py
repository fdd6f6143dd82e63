"""Adapters go out as `peft` knows them, and merged into the model. Training them equals peft's
training."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from p2p_dtfm.core.protocol.sections.lora_spec import LoraSpec
from p2p_dtfm.train.data.blob_store import BlobStore
from p2p_dtfm.train.hugging_face.export import export_hugging_face
from p2p_dtfm.train.hugging_face.model_card import KnownOfModel
from p2p_dtfm.train.hugging_face.peft_adapter import export_adapter
from tests.models.families import losses_of
from tests.models.test_families import logits_of, their_model
from tests.models.test_hugging_face import tokens_of
from tests.train.saved_layers import save_layers
from tests.train.test_lora import EVERY, batch_of, first_states, imported, wired_losses

PEFT = "peft, which is not among what the tests need"
OF_GPT2 = ("query", "value", "output", "up", "down")
CASES = {"llama": EVERY, "qwen3, biases": ("key", "gate"), "gpt2": OF_GPT2}


def trained(case: str, directory: Path):
    """A run's spec, and a checkpoint in a home: random adapters over a random model."""
    torch.set_num_threads(1)
    sizes = {} if case == "gpt2" else {"num_hidden_layers": 2}
    spec = imported(directory, LoraSpec(rank=3, alpha=7, targets=CASES[case]), case, **sizes)
    states = first_states(directory, spec)
    generator = torch.Generator().manual_seed(5)
    for state in states:
        state.parameters.copy_(torch.randn(state.parameter_count, generator=generator) * 0.2)
    home = directory / "home" / "runs" / "run"
    (home / "blobs").mkdir(parents=True)
    for path in (directory / "in" / "initial").iterdir():
        BlobStore(home / "blobs").put_file(path)
    return spec, states, save_layers(home / "checkpoints", spec, 0, 0, states)


def logits_here(states, tokens):
    stream = tokens
    with torch.no_grad():
        for state in states:
            stream = state.module(stream)
    return stream


@pytest.mark.parametrize("case", CASES)
def test_the_merged_model_computes_what_adapters_and_model_do(case: str, tmp_path: Path) -> None:
    spec, states, checkpoint = trained(case, tmp_path)
    tokens = tokens_of(spec)
    expected = logits_here(states, tokens)
    export_hugging_face(checkpoint, tmp_path / "out", None)
    assert (logits_of(their_model(tmp_path / "out"), tokens) - expected).abs().max() < 1e-4
    plain = logits_of(their_model(tmp_path / "hf"), tokens)
    assert (plain - expected).abs().max() > 0.01, "the adapters count"


def test_an_adapter_goes_out_without_the_model(tmp_path: Path) -> None:
    spec, states, checkpoint = trained("llama", tmp_path)
    for path in (checkpoint.parents[1] / "blobs").iterdir():
        path.unlink()
    export_adapter(checkpoint, tmp_path / "out", KnownOfModel())
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * spec.model.layers
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    ours = states[2].module.get_parameter("feed_forward_output.down.narrow")
    assert torch.equal(tensors[name], ours)
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["peft_type"]) == (3, 7, "LORA")
    assert "PeftModel" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_peft_reads_the_adapter(case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason=PEFT)
    spec, states, checkpoint = trained(case, tmp_path)
    export_adapter(checkpoint, tmp_path / "out", KnownOfModel())
    tokens = tokens_of(spec)
    model = peft.PeftModel.from_pretrained(their_model(tmp_path / "hf"), tmp_path / "out")
    expected = logits_here(states, tokens)
    assert (logits_of(model.eval(), tokens) - expected).abs().max() < 1e-4


@pytest.mark.nightly
def test_twenty_steps_equal_those_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason=PEFT)
    torch.set_num_threads(1)
    spec = imported(tmp_path, LoraSpec(rank=4, alpha=8, targets=EVERY), num_hidden_layers=3)
    checkpoint = save_layers(tmp_path / "first", spec, 0, 0, first_states(tmp_path, spec))
    export_adapter(checkpoint, tmp_path / "adapter", KnownOfModel())
    model = peft.PeftModel.from_pretrained(
        their_model(tmp_path / "hf"), tmp_path / "adapter", is_trainable=True
    )
    expected = losses_of(model, spec, batch_of(spec), 20)
    measured = wired_losses(tmp_path, spec, 20)
    assert max(abs(a - b) for a, b in zip(measured, expected, strict=True)) < 1e-4
    assert expected[-1] < expected[0] - 0.02
