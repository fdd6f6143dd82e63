"""A GPT-2 of Hugging Face's as the start of a run.

Safetensors only: the older pytorch_model.bin is a pickle, which may run anything when opened.
"""

import json
import math
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.train.hugging_face.export import (
    CONFIGURATION_NAME,
    LAYER_NORM_EPSILON,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    Progress,
    hugging_face_name,
)
from p2p_dtfm.train.hugging_face.tokenizer_json import read_tokenizer_json
from p2p_dtfm.train.model.gpt import layer_count, layer_entries
from p2p_dtfm.train.model.initial_state import write_initial

RUN_SPEC_NAME = "run.toml"
INITIAL_NAME = "initial"
_INDEX_NAME = "model.safetensors.index.json"
_JSON_LIMIT_BYTES = 16 << 20
_PREFIX = "transformer."
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
_SPEC = """\
# Goes on from {origin}.
#
# initial/ holds its weights: keep it beside this file until the run is founded. Newcomers fetch
# what they need from the peers.
name = "{name}"
total_steps = {total_steps}

[model]
layers = {layers}
width = {width}
heads = {heads}
context = {context}
vocabulary = {vocabulary}
initial = "{initial}"

[batch]
global_batch = {global_batch}
microbatch = {microbatch}

[optimizer]
peak_learning_rate = {learning_rate!r}
final_learning_rate = {final_learning_rate!r}
warmup_steps = {warmup_steps}

[data]
source = {data}

[evaluation]
sequences = {evaluation_sequences}
"""


@dataclass(frozen=True)
class Training:
    """How to train on; the file that `import` writes can be edited afterwards."""

    data: str
    total_steps: int
    global_batch: int
    microbatch: int
    learning_rate: float


class Configuration(msgspec.Struct, frozen=True):
    """The parts of config.json that decide what the model computes; defaults are GPT2Config's."""

    vocab_size: int
    n_embd: int
    n_layer: int
    n_head: int
    n_positions: int = 1024
    model_type: str = ""
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = LAYER_NORM_EPSILON
    n_inner: int | None = None
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True


def import_hugging_face(
    directory: Path,
    out: Path,
    name: str,
    training: Training,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> RunSpec:
    """Make `out` with a run spec, the weights and, if there is one, the tokenizer.

    Returns the run spec. Raises `UserError` for a model that is not GPT-2's kind or is damaged.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already", "choose a new directory for --out")
    configuration = _read_configuration(directory / CONFIGURATION_NAME)
    tokenizer_path = directory / TOKENIZER_NAME
    tokenizer = read_tokenizer_json(tokenizer_path) if tokenizer_path.is_file() else None
    draft = _spec(_spec_text(configuration, directory, name, training, ""), out)
    temporary = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        with _Weights(directory) as weights:
            initial = write_initial(
                temporary / INITIAL_NAME,
                draft,
                _told(draft, lambda n: _parameters(draft, n, weights, configuration), progress),
            )
        text = _spec_text(configuration, directory, name, training, initial.digest())
        if tokenizer is not None:
            (temporary / TOKENIZER_NAME).write_bytes(tokenizer.to_bytes())
        (temporary / RUN_SPEC_NAME).write_text(text, encoding="utf-8")
        os.replace(temporary, out)
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror or error}",
            "choose a directory that you may write to for --out, with enough space",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _spec(text, out)


def _told(
    spec: RunSpec, parameters: Callable[[int], Iterator[Tensor]], progress: Progress
) -> Callable[[int], Iterator[Tensor]]:
    """The same parameters of a layer; `progress` hears of each."""
    shapes = [shape for n in range(layer_count(spec)) for _, shape in layer_entries(spec, n)]
    total_bytes = 4 * sum(map(math.prod, shapes))
    done_bytes = 0

    def of_layer(layer: int) -> Iterator[Tensor]:
        nonlocal done_bytes
        for tensor in parameters(layer):
            yield tensor
            done_bytes += 4 * tensor.numel()
            progress(done_bytes, total_bytes)

    return of_layer


def _read_configuration(path: Path) -> Configuration:
    fix = "give the directory of a GPT-2 model: config.json and model.safetensors"
    try:
        with path.open("rb") as file:
            configuration = msgspec.json.decode(file.read(_JSON_LIMIT_BYTES), type=Configuration)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", fix) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UserError(f"{path} does not describe a GPT-2: {error}", fix) from error
    unlike = _unlike(configuration)
    if unlike:
        raise UserError(f"{path} describes a model that cannot be trained here: {unlike}", fix)
    return configuration


def _unlike(configuration: Configuration) -> str:
    """In what the model differs from ours; empty if in nothing."""
    if configuration.model_type != "gpt2":
        return f"model_type is {configuration.model_type!r}, not 'gpt2'"
    if configuration.activation_function not in _TANH_GELU:
        return f"activation_function is {configuration.activation_function!r}, not 'gelu_new'"
    if not math.isclose(configuration.layer_norm_epsilon, LAYER_NORM_EPSILON):
        return f"layer_norm_epsilon is {configuration.layer_norm_epsilon}, not 1e-05"
    if configuration.n_inner not in (None, 4 * configuration.n_embd):
        return f"n_inner is {configuration.n_inner}, not 4 times n_embd"
    if not configuration.scale_attn_weights or configuration.scale_attn_by_inverse_layer_idx:
        return "its attention is scaled in another way"
    if configuration.add_cross_attention:
        return "it has cross-attention"
    return ""


def _spec_text(
    configuration: Configuration, directory: Path, name: str, training: Training, initial: str
) -> str:
    origin = directory.resolve().name
    return _SPEC.format(
        origin=origin.encode("ascii", "replace").decode().replace("\n", " "),
        name=name or run_name(origin),
        total_steps=training.total_steps,
        layers=configuration.n_layer,
        width=configuration.n_embd,
        heads=configuration.n_head,
        context=configuration.n_positions,
        vocabulary=configuration.vocab_size,
        initial=initial,
        global_batch=training.global_batch,
        microbatch=training.microbatch,
        learning_rate=training.learning_rate,
        final_learning_rate=training.learning_rate / 10,
        warmup_steps=min(100, training.total_steps // 10),
        data=json.dumps(training.data, ensure_ascii=False),
        evaluation_sequences=-(-32 // training.microbatch) * training.microbatch,
    )


def run_name(text: str) -> str:
    """Text made into what a run may be called."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "imported"


def _spec(text: str, out: Path) -> RunSpec:
    return parse_run_spec(tomllib.loads(text), str(out / RUN_SPEC_NAME))


def _parameters(
    spec: RunSpec, layer: int, weights: "_Weights", configuration: Configuration
) -> Iterator[Tensor]:
    for name, shape in layer_entries(spec, layer):
        source, is_transposed = hugging_face_name(spec.model, layer, name)
        if source == "lm_head.weight" and (
            configuration.tie_word_embeddings or source not in weights.names
        ):
            source = "transformer.wte.weight"
        tensor = weights.tensor(source).to(torch.float32)
        tensor = tensor.t() if is_transposed else tensor
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{source} in {weights.directory} has the shape {list(tensor.shape)}, and "
                f"{CONFIGURATION_NAME} asks for {list(shape)}",
                "see that both files belong to the same model",
            )
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"{source} in {weights.directory} holds values that are no numbers",
                "import another version of the model",
            )
        yield tensor


class _Weights:
    """Tensors of one or several safetensors files, by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names: Mapping[str, Path] = {}

    def __enter__(self) -> "_Weights":
        names: dict[str, Path] = {}
        for path in self._files():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  (it is no dict)
                        names[_full_name(name)] = path
            except (SafetensorError, OSError) as error:
                raise self._damaged(path, error) from error
        self.names = names
        return self

    def __exit__(self, *exception: object) -> None:
        self.names = {}

    def tensor(self, name: str) -> Tensor:
        path = self.names.get(name)
        if path is None:
            raise UserError(
                f"{self.directory} lacks {name}",
                "see that the download is complete and the model is a GPT2LMHeadModel",
            )
        try:
            with safe_open(path, framework="pt") as file:
                known = set(file.keys())
                tensor: Tensor = file.get_tensor(
                    name if name in known else name.removeprefix(_PREFIX)
                )
        except (SafetensorError, OSError) as error:
            raise self._damaged(path, error) from error
        return tensor

    def _files(self) -> list[Path]:
        index = self.directory / _INDEX_NAME
        if not index.is_file():
            path = self.directory / WEIGHTS_NAME
            if not path.is_file():
                raise UserError(
                    f"there is no {WEIGHTS_NAME} in {self.directory}",
                    "save the model as safetensors: model.save_pretrained(DIRECTORY)",
                )
            return [path]
        try:
            places = json.loads(index.read_bytes())["weight_map"].values()
            files = sorted({str(place) for place in places})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(index, error) from error
        if any(Path(name).name != name for name in files):
            raise UserError(f"{index} names files outside its directory", "import another copy")
        return [self.directory / name for name in files]

    def _damaged(self, path: Path, error: Exception) -> UserError:
        return UserError(f"cannot read {path}: {error}", "copy or download the model again")


def _full_name(name: str) -> str:
    """The original GPT-2 files leave out the prefix."""
    return name if name.startswith((_PREFIX, "lm_head.")) else _PREFIX + name
