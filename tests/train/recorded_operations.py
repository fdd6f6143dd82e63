"""The processor does what a device does with recordings: operations and their memory are kept, and
nothing of Python runs again."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CannotBeRecorded(Exception):
    """Raised for an operation that would need an answer of the device."""


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise CannotBeRecorded(str(function))
        for argument in function._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                place = function._schema.arguments.index(argument)
                written = named.get(argument.name) if argument.kwarg_only else arguments[place]
                for tensor in tree_leaves(written):
                    self._remember(tensor)
        result = function(*arguments, **named)
        self._made |= {
            each.untyped_storage().data_ptr()
            for each in tree_leaves(result)
            if isinstance(each, Tensor) and not self._is_given(each, arguments, named)
        }
        self.operations.append((function, arguments, named, result))
        return result

    @staticmethod
    def _is_given(tensor: Tensor, arguments: Any, named: Any) -> bool:
        given = [each for each in tree_leaves((arguments, named)) if isinstance(each, Tensor)]
        place = tensor.untyped_storage().data_ptr()
        return any(each.untyped_storage().data_ptr() == place for each in given)

    def _remember(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            return
        place = tensor.untyped_storage().data_ptr()
        if place not in self._made and place not in self.before:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self.before[place] = whole, whole.clone()


class OperationsRecorded:
    """The operations of one recording, with all that they touch."""

    def __init__(self, watch: _Watch) -> None:
        self._operations = watch.operations

    @torch.no_grad()
    def replay(self) -> None:
        for function, arguments, named, result in self._operations:
            again = function(*arguments, **named)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.data.copy_(new)


class ProcessorRecorder:
    """A recorder that knows only by its room where a recording was made. It does not check that
    nothing else uses the room meanwhile."""

    def __init__(self, fails_at: int = 0) -> None:
        self.recordings = 0
        self.at_end_of_aside: list[Callable[[], None]] = []
        self._fails_at = fails_at

    def room(self) -> object:
        return object()

    def record(self, work: Callable[[], None], room: object) -> OperationsRecorded:
        self.recordings += 1
        if self.recordings == self._fails_at:
            raise torch.OutOfMemoryError("none is left")
        with _Watch() as watch:
            work()
        for whole, before in watch.before.values():
            whole.data.copy_(before)
        return OperationsRecorded(watch)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield
        for look in self.at_end_of_aside:
            look()
