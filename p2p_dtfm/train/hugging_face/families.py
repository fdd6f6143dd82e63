"""The families of models that `transformers` and this program both know, and their tensors' names.

A tensor of ours is one or several of theirs, rows one after another. Llama keeps queries, keys and
values apart; GPT-2 stores matrices as [inputs, outputs].
"""

from typing import NamedTuple

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.model_spec import ModelSpec

CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PREFIXES = {"gpt2": "transformer.", "llama": "model.", "qwen3": "model."}
"""Beginnings of all names but the head's. Files of a model without a head leave them out."""
HEAD_NAME = "lm_head.weight"
TOKEN_NAMES = {
    "gpt2": "transformer.wte.weight",
    "llama": "model.embed_tokens.weight",
    "qwen3": "model.embed_tokens.weight",
}
"""Names of the token embedding. With a tied head it is the head's matrix as well."""

_GPT2_OUTSIDE = {
    "token.weight": "transformer.wte.weight",
    "position.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "logits.weight": HEAD_NAME,
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention_input": "attn.c_attn",
    "attention_output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward_input": "mlp.c_fc",
    "feed_forward_output": "mlp.c_proj",
}
_LLAMA_OUTSIDE = {
    "token.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "logits.weight": HEAD_NAME,
}
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "attention_output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward_output": "mlp.down_proj",
}


class Part(NamedTuple):
    """A tensor of theirs, which holds so many rows of one of ours."""

    name: str
    shape: tuple[int, ...]
    """The shape in our order. A tensor that is transposed has theirs the other way round."""
    is_transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.is_transposed else self.shape


def parts_of(model: ModelSpec, layer: int, name: str, shape: tuple[int, ...]) -> list[Part]:
    """The places of a parameter of ours in the model's family, in the order of its rows."""
    if model.tied_head and name == "logits.weight":
        return []  # the token embedding
    part, kind = name.rsplit(".", 1)
    in_block = 0 < layer <= model.layers
    if family_of(model) == "gpt2":
        if not in_block:
            return [Part(_GPT2_OUTSIDE[name], shape)]
        is_matrix = kind == "weight" and not part.endswith("norm")  # GPT-2's Conv1D is [in, out]
        return [Part(f"transformer.h.{layer - 1}.{_GPT2_BLOCK[part]}.{kind}", shape, is_matrix)]
    if not in_block:
        return [Part(_LLAMA_OUTSIDE[name], shape)]
    place = f"model.layers.{layer - 1}."
    rows: dict[str, int] = {}
    if part == "attention_input":
        rows |= {"self_attn.q_proj": model.query_width}
        rows |= {"self_attn.k_proj": model.key_width, "self_attn.v_proj": model.key_width}
    elif part == "feed_forward_input":
        rows |= {"mlp.gate_proj": model.hidden_width, "mlp.up_proj": model.hidden_width}
    else:
        rows |= {_LLAMA_BLOCK[part]: shape[0]}
    return [Part(f"{place}{theirs}.{kind}", (count, *shape[1:])) for theirs, count in rows.items()]


def own_parts(model: ModelSpec, layer: int, name: str, shape: tuple[int, ...]) -> list[Part]:
    """The place of a parameter under our own name, in one file for the whole model."""
    return [Part(f"layer.{layer}.{name}", shape)]


def family_of(model: ModelSpec) -> str:
    """The family of `CLASSES` that computes the same. Raises `UserError` that says why none
    does."""
    if model.norm == "layer" and model.position == "learned":
        family = "gpt2"
        unlike = [
            (model.feed_forward != "gelu", f"feed_forward is {model.feed_forward!r}"),
            (model.key_width != model.query_width, f"kv_heads is {model.kv_heads}"),
            (model.query_width != model.width, f"head_width is {model.head_width}"),
            (not (model.attention_bias and model.feed_forward_bias), "biases are left out"),
        ]
    else:
        family = "qwen3" if model.query_key_norm else "llama"
        unlike = [
            (model.norm != "rms", f"norm is {model.norm!r}"),
            (model.position != "rope", f"position is {model.position!r}"),
            (model.feed_forward != "swiglu", f"feed_forward is {model.feed_forward!r}"),
            (
                family == "llama" and model.width % model.heads != 0,
                f"width is no multiple of heads ({model.heads})",
            ),
            (
                family == "qwen3" and model.feed_forward_bias,
                "feed_forward_bias is true",
            ),
        ]
    reasons = [reason for is_so, reason in unlike if is_so]
    if not reasons:
        return family
    raise UserError(
        f"transformers has no model like this one: a {CLASSES[family]} comes nearest, and "
        f"{', '.join(reasons)}",
        "export one file under our own names: --format safetensors",
    )
