from array import array

def paper_anneal(
    data_parallel_ns: array[int],
    pair_ranks: array[int],
    lengths_ns: array[int],
    kinds: array[int],
    start: array[int],
    logarithms: array[int],
    stages: int,
    replicas: int,
    seed: int,
    temperature_ns: int,
    factor_q20: int,
    levels: int,
    moves: int,
    /,
) -> tuple[int, bytes]: ...
