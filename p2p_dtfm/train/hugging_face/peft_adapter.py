"""Adapters as the library `peft` knows them: a directory that lies over the model they began with.

Each adapter of `peft` lies beside one matrix, so queries, keys and values of a Llama have names of
their own. A GPT-2 keeps the three in one matrix. There our three adapters are rows and columns of a
single one three times as wide, with zeros between, and its rank and alpha say so.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.lora_spec import AdaptedMatrix, adapted_matrices
from p2p_dtfm.train.hugging_face.families import family_of, parts_of
from p2p_dtfm.train.hugging_face.model_card import CARD_NAME, KnownOfModel, model_card
from p2p_dtfm.train.hugging_face.new_place import made_whole, require_new
from p2p_dtfm.train.model.checkpoint import load_layer, read_manifest
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.lora.adapted import AdaptedLinear
from p2p_dtfm.train.model.tensor_file import Entry, write_tensors

CONFIGURATION_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def export_adapter(checkpoint: Path, out: Path, told: KnownOfModel) -> tuple[RunSpec, int]:
    """Make the directory `out` from the checkpoint of one step; returns its run and step. Raises
    `UserError`.

    What is frozen is not needed for it. `out` appears whole or not at all.
    """
    require_new(out)
    manifest = read_manifest(checkpoint)
    spec = manifest.spec()
    assert spec.trains_adapters
    family = family_of(spec.model)
    tensors: list[tuple[str, Tensor]] = []
    wider: dict[str, int] = {}
    for layer in range(1, spec.model.layers + 1):
        state = load_layer(checkpoint, layer)
        for name, narrow, wide in _theirs(state):
            tensors.append((f"{_PREFIX}{name}.lora_A.weight", narrow))
            tensors.append((f"{_PREFIX}{name}.lora_B.weight", wide))
            if narrow.shape[0] != spec.lora.rank:
                wider[name.split(".h.")[-1].split(".", 1)[1]] = narrow.shape[0]
    modules = sorted({name.split(".")[-3] for name, _ in tensors})
    if family == "gpt2":  # `c_proj` is in attention and in the feed-forward network alike
        modules = sorted({".".join(name.split(".")[-4:-2]) for name, _ in tensors})
    configuration = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": spec.lora.rank,
        "lora_alpha": spec.lora.alpha,
        "target_modules": modules,
        "rank_pattern": wider,
        "alpha_pattern": {n: rank * spec.lora.alpha / spec.lora.rank for n, rank in wider.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": family == "gpt2",
        "inference_mode": True,
    }
    with made_whole(out) as made:
        made.mkdir()
        entries: list[Entry] = [(name, tuple(tensor.shape)) for name, tensor in tensors]
        written = (tensor for _, tensor in tensors)
        write_tensors(made / WEIGHTS_NAME, entries, {"format": "pt"}, written)
        text = json.dumps(configuration, indent=2) + "\n"
        (made / CONFIGURATION_NAME).write_text(text, encoding="utf-8")
        card = model_card(spec, manifest.step, told, is_adapter=True)
        (made / CARD_NAME).write_text(card, encoding="utf-8")
    return spec, manifest.step


def _theirs(state: LayerState) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The adapters of a block: for each adapted module of theirs, its name and its two matrices."""
    spec = state.spec
    matrices = adapted_matrices(spec.model, spec.lora)
    for part in dict.fromkeys(matrix.part for matrix in matrices):
        linear = state.module.get_submodule(part)
        assert isinstance(linear, AdaptedLinear)
        of_part = [matrix for matrix in matrices if matrix.part == part]
        shape = (linear.out_features, linear.in_features)
        row = 0
        for place in parts_of(spec.model, state.layer, f"{part}.weight", shape):
            end = row + place.shape[0]
            inside = [matrix for matrix in of_part if row <= matrix.first_row < end]
            if inside:
                name = place.name.removesuffix(".weight")
                yield name, *_together(linear, inside, row, place.shape[0])
            row = end


def _together(
    linear: AdaptedLinear, matrices: list[AdaptedMatrix], row: int, outputs: int
) -> tuple[Tensor, Tensor]:
    """One adapter of `outputs` rows, from `row` on, that computes what all of these do."""
    adapters = [linear.adapter(matrix) for matrix in matrices]
    narrow = torch.cat([adapter.narrow.detach() for adapter in adapters])
    if len(matrices) == 1 and matrices[0].outputs == outputs:
        return narrow, adapters[0].wide.detach()
    wide = torch.zeros(outputs, narrow.shape[0])
    column = 0
    for matrix, adapter in zip(matrices, adapters, strict=True):
        first = matrix.first_row - row
        values = adapter.wide.detach()
        wide[first : first + matrix.outputs, column : column + values.shape[1]] = values
        column += values.shape[1]
    return narrow, wide
