"""config.json of a model of `transformers`, read and written.

Defaults are those of `transformers`, since its files may leave them out.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.model_spec import ModelSpec, RopeSpec
from p2p_dtfm.train.hugging_face.families import CLASSES, family_of

CONFIGURATION_NAME = "config.json"
LIMIT_BYTES = 16 << 20
_TANH_GELU = (
    "gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"
)  # fmt: skip
"""Names of one and the same function."""
_THETA = 10000.0
_ROPE_KEYS = frozenset(
    (
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
        "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
        "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "finetuned",
    )
)  # fmt: skip


class Configuration(msgspec.Struct, frozen=True):
    """A model as the run spec's `[model]` describes it, without context and weights."""

    family: str
    model: dict[str, Any]
    positions: int
    """The number of tokens that the model is made for."""
    is_tied: bool
    """Whether the head is the token embedding."""


class _Gpt2(msgspec.Struct, frozen=True):
    vocab_size: int
    n_embd: int
    n_layer: int
    n_head: int
    n_positions: int = 1024
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    n_inner: int | None = None
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True


class _Llama(msgspec.Struct, frozen=True):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None


class _Qwen3(_Llama, frozen=True):
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    max_position_embeddings: int = 32768


class _KindOfModel(msgspec.Struct, frozen=True):
    model_type: str = ""
    quantization_config: Any = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


def read_configuration(path: Path) -> Configuration:
    """Raises `UserError` for what cannot be trained here, with the reason."""
    fix = f"give the directory of a {' or '.join(CLASSES.values())}, as save_pretrained writes it"
    if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
        raise UserError(f"cannot read {path}: it is no file", fix)
    try:
        with path.open("rb") as file:
            payload = file.read(LIMIT_BYTES)
        kind = msgspec.json.decode(payload, type=_KindOfModel)
        json.loads(payload, object_pairs_hook=_once_each)
        if kind.model_type not in CLASSES:
            known = ", ".join(map(repr, CLASSES))
            raise ValueError(f"model_type is {kind.model_type!r}, not one of {known}")
        if kind.quantization_config is not None:
            raise ValueError("its weights are quantised")
        _require_tokens(kind)
        if kind.model_type == "gpt2":
            return _from_gpt2(msgspec.json.decode(payload, type=_Gpt2))
        shape: type[_Llama] = _Qwen3 if kind.model_type == "qwen3" else _Llama
        return _from_llama(msgspec.json.decode(payload, type=shape), kind.model_type)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", fix) from error
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UserError(f"{path} does not describe a model: {error}", fix) from error
    except ValueError as error:
        raise UserError(
            f"{path} describes a model that cannot be trained here: {error}",
            f"choose a model of {' or '.join(CLASSES.values())} without that",
        ) from error


def _once_each(pairs: list[tuple[str, Any]]) -> None:
    """Refuse a name that is stated twice: one reader takes the first value, another the last."""
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"{name} is stated twice")
        names.add(name)


def _require_tokens(kind: _KindOfModel) -> None:
    """Refuse numbers that are no tokens. Special tokens go out again as they are. Some lie beyond
    the vocabulary, as GPT-2's do by default, and -1 means none."""
    ends = kind.eos_token_id if isinstance(kind.eos_token_id, list) else [kind.eos_token_id]
    for name, token in (
        ("bos_token_id", kind.bos_token_id),
        ("pad_token_id", kind.pad_token_id),
        *(("eos_token_id", end) for end in ends),
    ):
        if token is not None and not -1 <= token < 1 << 31:
            raise ValueError(f"{name} is {token}")


def _require_something(**sizes: int | None) -> None:
    """Refuse sizes of 0. A size that is left out has a default; 0 of it is nothing."""
    for name, size in sizes.items():
        if size == 0:
            raise ValueError(f"{name} is 0")


def _from_gpt2(given: _Gpt2) -> Configuration:
    if given.activation_function not in _TANH_GELU:
        raise ValueError(f"activation_function is {given.activation_function!r}, not 'gelu_new'")
    if not given.scale_attn_weights:
        raise ValueError("its attention is not scaled: scale_attn_weights is false")
    if given.scale_attn_by_inverse_layer_idx:
        raise ValueError(
            "its attention is scaled by layer: scale_attn_by_inverse_layer_idx is true"
        )
    _require_something(n_inner=given.n_inner)
    if given.add_cross_attention:
        raise ValueError("it has cross-attention")
    model = {
        "layers": given.n_layer,
        "width": given.n_embd,
        "heads": given.n_head,
        "vocabulary": given.vocab_size,
        "norm_epsilon": given.layer_norm_epsilon,
        "feed_forward_width": 0 if given.n_inner in (None, 4 * given.n_embd) else given.n_inner,
    }
    return Configuration("gpt2", model, given.n_positions, given.tie_word_embeddings)


def _from_llama(given: _Llama, family: str) -> Configuration:
    if given.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {given.hidden_act!r}, not 'silu'")
    if _slides(given):
        raise ValueError("its attention slides: it does not see all tokens before")
    _require_something(
        head_dim=given.head_dim,
        num_key_value_heads=given.num_key_value_heads,
        intermediate_size=given.intermediate_size,
    )
    heads, width = given.num_attention_heads, given.hidden_size
    groups = given.num_key_value_heads
    shared = heads > 0 and given.head_dim is not None and given.head_dim * heads == width
    model = {
        "layers": given.num_hidden_layers,
        "width": width,
        "heads": heads,
        "vocabulary": given.vocab_size,
        "norm": "rms",
        "norm_epsilon": given.rms_norm_eps,
        "position": "rope",
        "rope": _rope(given),
        "feed_forward": "swiglu",
        "feed_forward_width": given.intermediate_size,
        "kv_heads": 0 if groups in (None, heads) else groups,
        "head_width": 0 if shared or given.head_dim is None else given.head_dim,
        "attention_bias": given.attention_bias,
        "feed_forward_bias": family == "llama" and given.mlp_bias,
        "query_key_norm": family == "qwen3",
    }
    return Configuration(family, model, given.max_position_embeddings, given.tie_word_embeddings)


def _slides(given: _Llama) -> bool:
    """Whether any block sees the newest tokens alone. What is stated for each block counts; else
    the first `max_window_layers` blocks see all tokens."""
    if given.layer_types is not None:
        return bool(set(given.layer_types) - {"full_attention"})
    has_window = given.use_sliding_window and given.sliding_window is not None
    return has_window and given.max_window_layers < given.num_hidden_layers


def _rope(given: _Llama) -> dict[str, Any]:
    """`[model.rope]` of a configuration, which may state it in the older or in the newer way."""
    stated = given.rope_scaling or given.rope_parameters or {}
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise ValueError(
            f"the rope type {kind!r} is unknown here; known are default, linear, dynamic, llama3 "
            f"and yarn"
        )
    unknown = sorted(set(stated) - _ROPE_KEYS)
    if unknown:
        raise ValueError(f"the rope parameter {unknown[0]!r} is unknown here")
    whole = stated.get("partial_rotary_factor", given.partial_rotary_factor)
    if whole not in (None, 1, 1.0):
        raise ValueError(f"only a part of each head turns: partial_rotary_factor is {whole}")
    theta = _number(stated, "rope_theta", _THETA if given.rope_theta is None else given.rope_theta)
    rope: dict[str, Any] = {"theta": theta}
    if kind == "default":
        return rope
    return {**rope, "scaling": kind, **_stretched(given, stated, kind)}


def _stretched(given: _Llama, stated: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The parameters that belong to a scaling."""
    if kind in ("linear", "dynamic"):
        return {"factor": _number(stated, "factor", None)}
    original = given.original_max_position_embeddings or stated.get(
        "original_max_position_embeddings", given.max_position_embeddings
    )
    if not isinstance(original, int) or original < 1:
        raise ValueError(f"original_max_position_embeddings is {original!r}")
    rope: dict[str, Any] = {"original_positions": original}
    if kind == "llama3":
        rope["factor"] = _number(stated, "factor", None)
        rope["low_frequency_factor"] = _number(stated, "low_freq_factor", None)
        rope["high_frequency_factor"] = _number(stated, "high_freq_factor", None)
        return rope
    rope["factor"] = _number(stated, "factor", given.max_position_embeddings / original)
    rope["fast_rotations"] = _number(stated, "beta_fast", 32.0)
    rope["slow_rotations"] = _number(stated, "beta_slow", 1.0)
    rope["whole_rotations"] = stated.get("truncate", True)
    rope["attention_factor"] = _attention_factor(stated, rope["factor"])
    return rope


def _attention_factor(stated: Mapping[str, Any], factor: float) -> float:
    """The stated attention factor; 0 if it follows from `factor` alone."""
    if stated.get("attention_factor") is not None:
        factor = _number(stated, "attention_factor", None)
        if factor <= 0:
            raise ValueError(f"the rope parameter attention_factor is {factor:g}")
        return factor
    scale, all_dimensions = stated.get("mscale"), stated.get("mscale_all_dim")
    if not (scale and all_dimensions) or factor <= 1:
        return 0.0
    logarithm = 0.1 * math.log(factor)
    above = _number(stated, "mscale", None) * logarithm + 1.0
    return above / (_number(stated, "mscale_all_dim", None) * logarithm + 1.0)


def _number(stated: Mapping[str, Any], name: str, default: float | None) -> float:
    value = stated.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"the rope parameter {name} is {value!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"the rope parameter {name} is beyond all numbers") from error


def configuration_of(
    model: ModelSpec, end_token: int | None, stated: Mapping[str, Any]
) -> dict[str, object]:
    """The content of config.json. `stated`: special tokens as another config.json names them."""
    family = family_of(model)
    shape = _gpt2_shape(model) if family == "gpt2" else _llama_shape(model, family)
    return {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "vocab_size": model.vocabulary,
        **shape,
        "tie_word_embeddings": model.tied_head,
        "initializer_range": 0.02,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        **stated,
        "use_cache": True,
        "dtype": "float32",
    }


def _gpt2_shape(model: ModelSpec) -> dict[str, object]:
    return {
        "n_positions": model.context,
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.hidden_width,
        "activation_function": "gelu_new",  # GELU approximated by tanh
        "layer_norm_epsilon": model.norm_epsilon,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _llama_shape(model: ModelSpec, family: str) -> dict[str, object]:
    biases = {"attention_bias": model.attention_bias}
    if family == "llama":
        biases["mlp_bias"] = model.feed_forward_bias
    return {
        "max_position_embeddings": model.rope.positions or model.context,
        "hidden_size": model.width,
        "intermediate_size": model.hidden_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.each_head,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope.theta,
        "rope_scaling": _rope_scaling(model.rope),
        **biases,
        "attention_dropout": 0.0,
    }


def _rope_scaling(rope: RopeSpec) -> dict[str, object] | None:
    """`rope_scaling` in the older way, which all versions of `transformers` read."""
    if rope.scaling == "none":
        return None
    content: dict[str, object] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        content["original_max_position_embeddings"] = rope.original_positions
    if rope.scaling == "llama3":
        content["low_freq_factor"] = rope.low_frequency_factor
        content["high_freq_factor"] = rope.high_frequency_factor
    if rope.scaling == "yarn":
        content["beta_fast"] = rope.fast_rotations
        content["beta_slow"] = rope.slow_rotations
        content["truncate"] = rope.whole_rotations
        if rope.attention_factor:
            content["attention_factor"] = rope.attention_factor
    return content
