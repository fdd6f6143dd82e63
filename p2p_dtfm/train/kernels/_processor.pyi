from typing_extensions import Buffer

def adam_w(
    parameters: Buffer,
    gradient: Buffer,
    first_moments: Buffer,
    second_moments: Buffer,
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
def squared_norm(values: Buffer, /) -> float: ...
def add(first: Buffer, second: Buffer, total: Buffer, /) -> bool: ...
def copy(values: Buffer, target: Buffer, /) -> bool: ...
def is_within(values: Buffer, limit: float, /) -> bool: ...
