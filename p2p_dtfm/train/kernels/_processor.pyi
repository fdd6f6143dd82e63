from numpy import float32
from numpy.typing import NDArray

Array = NDArray[float32]

def adam_w(
    parameters: Array,
    gradient: Array,
    first_moments: Array,
    second_moments: Array,
    start: int,
    end: int,
    beta1: float,
    rest1: float,
    beta2: float,
    rest2: float,
    scale2: float,
    epsilon: float,
    decay: float,
    step_size: float,
    /,
) -> None: ...
def squared_norm(values: Array, /) -> float: ...
def add(first: Array, second: Array, total: Array, /) -> bool: ...
def copy(values: Array, target: Array, /) -> bool: ...
def is_within(values: Array, limit: float, /) -> bool: ...
