"""Tensors of one or several safetensors files of a model's directory, by name.

Safetensors only: the older pytorch_model.bin is a pickle, which may run anything when opened.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.hugging_face.families import HEAD_NAME, Part

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_INDEX_LIMIT_BYTES = 64 << 20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
"""Masks and tables that old files hold among the weights; they follow from the configuration."""
_ROWS = 1 << 12
"""Rows of two matrices that are compared at a time."""
_FLOATS = ("F64", "F32", "F16", "BF16")


class Weights:
    """A model's tensors. `prefix` is put before names that lack it. Raises `UserError`."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self.directory = directory
        self._places: dict[str, tuple[Path, str]] = {}
        for path in self._files():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  (it is no dict)
                        has_prefix = name.startswith((prefix, HEAD_NAME))
                        self._add(name if has_prefix else prefix + name, (path, name))
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error

    def _add(self, name: str, place: tuple[Path, str]) -> None:
        if name in self._places:
            raise UserError(
                f"{self.directory} holds {name} twice, in {self._places[name][0].name} and in "
                f"{place[0].name}",
                "see that all its files belong to the same model",
            )
        self._places[name] = place

    def check(self, wanted: Iterable[Part], ignored: Iterable[str] = ()) -> None:
        """Require that exactly these tensors are there, with these shapes."""
        left = {name for name in self._places if not name.endswith(_NO_WEIGHTS)} - {*ignored}
        for part in wanted:
            self._check_one(part)
            left.discard(part.name)
        if left:
            raise UserError(
                f"{self.directory} holds {min(left)}, which a model of its configuration does not "
                f"have",
                "see that both files belong to the same model",
            )

    def holds_unlike(self, name: str, other: str) -> bool:
        """Whether there is a tensor of this name with other values than the other tensor."""
        if name not in self._places or other not in self._places:
            return False
        (path, stored), (other_path, other_stored) = self._places[name], self._places[other]
        try:
            with (
                safe_open(path, framework="pt") as file,
                safe_open(other_path, framework="pt") as other_file,
            ):
                ours, theirs = file.get_slice(stored), other_file.get_slice(other_stored)
                shape = ours.get_shape()
                return shape != theirs.get_shape() or any(
                    not torch.equal(
                        ours[row : row + _ROWS].float(), theirs[row : row + _ROWS].float()
                    )
                    for row in range(0, shape[0] if shape else 0, _ROWS)
                )
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error

    def tensor(self, part: Part) -> Tensor:
        """Their tensor as a part of ours, in fp32."""
        path, name = self._place(part.name)
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name).to(torch.float32)
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"{part.name} in {self.directory} holds values that are no numbers",
                "import another version of the model",
            )
        return tensor.t() if part.is_transposed else tensor

    def _check_one(self, part: Part) -> None:
        path, name = self._place(part.name)
        try:
            with safe_open(path, framework="pt") as file:
                piece = file.get_slice(name)
                shape, kind = tuple(piece.get_shape()), str(piece.get_dtype())
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
        if shape != part.stored_shape:
            raise UserError(
                f"{part.name} in {self.directory} has the shape {list(shape)}, and config.json "
                f"asks for {list(part.stored_shape)}",
                "see that both files belong to the same model",
            )
        if kind not in _FLOATS:
            raise UserError(
                f"{part.name} in {self.directory} is stored as {kind}",
                "import a version of the model in fp32, fp16 or bf16",
            )

    def _place(self, name: str) -> tuple[Path, str]:
        if name not in self._places:
            raise UserError(
                f"{self.directory} lacks {name}",
                "see that the download is complete, and that config.json is that of this model",
            )
        return self._places[name]

    def _files(self) -> list[Path]:
        index, whole = self.directory / INDEX_NAME, self.directory / WEIGHTS_NAME
        if not index.is_file():
            if not whole.is_file():
                raise self._without_weights()
            return [whole]
        try:
            with index.open("rb") as file:
                places = json.loads(file.read(_INDEX_LIMIT_BYTES))["weight_map"].values()
            files = sorted({"".join(place) for place in places})  # TypeError if a name is no text
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(index, error) from error
        if not all(map(_is_plain_name, files)):
            raise UserError(f"{index} names files outside its directory", "import another copy")
        shards = [self.directory / name for name in files]
        for shard in shards:
            if shard.exists() and not shard.is_file():  # opening a pipe would wait for ever
                raise UserError(f"cannot read {shard}: it is no file", "import another copy")
        if not shards or whole in shards or not whole.is_file():
            return shards
        if not any(shard.exists() for shard in shards):
            return [whole]  # saved anew as one file, the old index stayed behind
        raise UserError(
            f"{self.directory} holds the weights twice: {WEIGHTS_NAME}, and what {INDEX_NAME} "
            f"names, such as {files[0]}",
            "remove those that are not meant (transformers reads the one file)",
        )

    def _without_weights(self) -> UserError:
        fix = "save the model as safetensors: model.save_pretrained(DIRECTORY)"
        try:
            found = [path.name for path in self.directory.iterdir() if path.suffix in _PICKLES]
        except OSError:
            found = []
        if found:
            return UserError(
                f"there is no {WEIGHTS_NAME} in {self.directory}, and {min(found)} is a pickle, "
                f"which may run anything when it is opened",
                fix,
            )
        return UserError(f"there is no {WEIGHTS_NAME} in {self.directory}", fix)


def _is_plain_name(name: str) -> bool:
    """Whether the name can only be a file of the directory itself."""
    return Path(name).name == name != ".." and name.isprintable() and name != ""


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"cannot read {path}: {error}", "copy or download the model again")
