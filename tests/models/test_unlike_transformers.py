"""A directory of a model must not become another model here than with `transformers`."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.model_spec import RopeSpec
from p2p_dtfm.train.hugging_face.configuration import read_configuration
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from p2p_dtfm.train.model.block import attention_factor, frequencies
from tests.models.conftest import own_logits
from tests.models.drawn import drawn_rope
from tests.models.families import make_model
from tests.models.test_families import logits_of
from tests.models.test_hugging_face import imported_states, tokens_of

TRAINING = Training("python-standard-library", 20, 4, 2, 3e-3)


@pytest.mark.parametrize("seed", range(40))
def test_frequencies_are_theirs_to_the_last_bit(seed: int, tmp_path: Path) -> None:
    """Times a position of some thousands, a difference in the last bit would be seen in the
    logits."""
    chance = random.Random(seed)
    positions, head = chance.choice((200, 1024, 4096)), chance.choice((6, 16, 64, 128))
    stated = drawn_rope(chance, positions)
    config = LlamaConfig(
        hidden_size=2 * head,
        num_attention_heads=2,
        head_dim=head,
        max_position_embeddings=positions,
        rope_parameters=stated,
    )
    theirs = LlamaRotaryEmbedding(config)
    config.save_pretrained(tmp_path)
    read = read_configuration(tmp_path / "config.json").model
    rope = RopeSpec.model_validate(read["rope"])
    assert torch.equal(frequencies(rope, head), theirs.inv_freq), stated
    assert attention_factor(rope) == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_logits_are_theirs_at_positions_far_from_the_first(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 3.0}
    rope["original_max_position_embeddings"] = 256
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 8.0}
    theirs = make_model("llama", max_position_embeddings=1024, head_dim=64, rope_parameters=rope)
    theirs.save_pretrained(tmp_path / "hf")
    spec = import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    tokens = tokens_of(spec)
    assert tokens.shape[1] == 1024
    ours = own_logits(imported_states(tmp_path / "in", spec), tokens)
    assert (ours - logits_of(theirs, tokens)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("stated", "slides"),
    [
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, False),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, True),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, False),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "full_attention"],
            },
            False,
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 2,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            True,
        ),
    ],
)
def test_only_what_slides_is_refused(stated: dict[str, Any], slides: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    theirs = make_model("qwen3", head_dim=8, **stated)
    theirs.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    if "layer_types" not in stated:
        del config["layer_types"]  # files of before 2025 have none
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | stated))
    if slides:
        with pytest.raises(UserError, match="its attention slides"):
            import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
        return
    spec = import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    tokens = tokens_of(spec)
    ours = own_logits(imported_states(tmp_path / "in", spec), tokens)
    assert (ours - logits_of(theirs, tokens)).abs().max() < 1e-5


@pytest.mark.parametrize("shard_sizes", [("20KB", "1GB"), ("1GB", "20KB")])
def test_a_directory_that_was_saved_to_twice(shard_sizes: tuple[str, str], tmp_path: Path) -> None:
    """`save_pretrained` leaves older files behind. Which of two models is meant is not guessed."""
    directory = tmp_path / "hf"
    make_model("llama", 1).save_pretrained(directory, max_shard_size=shard_sizes[0])
    theirs = make_model("llama", 2)
    theirs.save_pretrained(directory, max_shard_size=shard_sizes[1])
    assert (directory / "model.safetensors.index.json").is_file()
    assert (directory / "model.safetensors").is_file()
    if shard_sizes[1] == "20KB":
        with pytest.raises(UserError, match="holds the weights twice") as refused:
            import_hugging_face(directory, tmp_path / "in", "", TRAINING)
        assert refused.value.fixes
        return
    spec = import_hugging_face(directory, tmp_path / "in", "", TRAINING)
    tokens = tokens_of(spec)
    ours = own_logits(imported_states(tmp_path / "in", spec), tokens)
    assert (ours - logits_of(theirs, tokens)).abs().max() < 1e-5


def test_sizes_that_no_run_has_are_refused_with_something_to_do(tmp_path: Path) -> None:
    make_model("gpt2", n_embd=6, n_head=2).save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match="width: must be 8 or more") as refused:
        import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    assert refused.value.fixes[0].startswith("import another model")


@pytest.mark.parametrize("activation", ["gelu_fast", "gelu_accurate"])
def test_other_names_of_the_same_activation(activation: str, tmp_path: Path) -> None:
    theirs = make_model("gpt2", activation_function=activation)
    theirs.save_pretrained(tmp_path / "hf")
    spec = import_hugging_face(tmp_path / "hf", tmp_path / "in", "", TRAINING)
    tokens = tokens_of(spec)
    ours = own_logits(imported_states(tmp_path / "in", spec), tokens)
    assert (ours - logits_of(theirs, tokens)).abs().max() < 1e-5
