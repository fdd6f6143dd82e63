"""Configurations of `transformers` drawn at random, as strangers would try them."""

import random
from typing import Any

_ROPES = ("default", "linear", "dynamic", "llama3", "yarn")


def drawn_configuration(seed: int) -> tuple[str, dict[str, Any]]:
    """A family and what is stated of it; `transformers` can make all of it."""
    chance = random.Random(seed)
    family = chance.choice(("gpt2", "llama", "llama", "qwen3", "qwen3"))
    return family, (_gpt2(chance) if family == "gpt2" else _grouped(chance, family))


def _gpt2(chance: random.Random) -> dict[str, Any]:
    heads = chance.choice((1, 2, 3, 4))
    return {
        "vocab_size": chance.randrange(40, 300),
        "n_positions": chance.choice((8, 32, 57)),
        "n_embd": heads * chance.choice((4, 6, 10, 16)),
        "n_layer": chance.choice((1, 2, 3)),
        "n_head": heads,
        "n_inner": chance.choice((None, 40, 7)),
        "activation_function": chance.choice(
            ("gelu_new", "gelu_new", "gelu_pytorch_tanh", "gelu", "relu")
        ),
        "layer_norm_epsilon": chance.choice((1e-5, 1e-6, 1e-12)),
        "scale_attn_weights": chance.random() > 0.1,
        "scale_attn_by_inverse_layer_idx": chance.random() < 0.1,
        "reorder_and_upcast_attn": chance.random() < 0.1,
        "tie_word_embeddings": chance.random() < 0.5,
        "resid_pdrop": chance.choice((0.0, 0.1)),
    }


def _grouped(chance: random.Random, family: str) -> dict[str, Any]:
    groups, per_group = chance.choice((1, 2, 3)), chance.choice((1, 2, 4))
    heads = groups * per_group
    width = heads * chance.choice((3, 4, 8)) if family == "llama" else chance.choice((12, 20, 32))
    own_size = chance.random() < 0.6 or width % heads or width // heads % 2 or width // heads < 4
    head = chance.choice((4, 6, 10, 16)) if own_size else width // heads
    positions = chance.choice((16, 32, 64))
    stated = {
        "vocab_size": chance.randrange(40, 300),
        "hidden_size": width,
        "intermediate_size": chance.choice((7, 24, 40, 65)),
        "num_hidden_layers": chance.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "max_position_embeddings": positions,
        "rms_norm_eps": chance.choice((1e-5, 1e-6, 1e-8)),
        "attention_bias": chance.random() < 0.3,
        "attention_dropout": chance.choice((0.0, 0.1)),
        "tie_word_embeddings": chance.random() < 0.5,
        "hidden_act": chance.choice(("silu", "silu", "silu", "gelu", "swish")),
        "rope_parameters": drawn_rope(chance, positions),
    }
    if family == "llama":
        stated["mlp_bias"] = chance.random() < 0.3
    return stated


def drawn_rope(chance: random.Random, positions: int) -> dict[str, Any]:
    kind = chance.choice(_ROPES)
    stated: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": chance.choice((100.0, 1e4, 1e6, 500000)),
    }
    if kind == "default":
        return stated
    stated["factor"] = chance.choice((1.0, 2, 3.5, 8.0))
    if kind in ("llama3", "yarn"):
        stated["original_max_position_embeddings"] = max(2, positions // chance.choice((1, 2, 4)))
    if kind == "llama3":
        stated |= {"low_freq_factor": 1.0, "high_freq_factor": chance.choice((2.0, 4.0))}
    if kind == "yarn" and chance.random() < 0.5:
        stated |= {"beta_fast": chance.choice((16, 32.0)), "beta_slow": 1.0}
        if chance.random() < 0.5:
            stated["attention_factor"] = chance.choice((0.8, 1.2))
    return stated
