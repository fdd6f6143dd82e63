from collections.abc import Sequence

def fair_weights(
    pair: Sequence[Sequence[int]], limit: Sequence[int], /
) -> tuple[int, ...] | None: ...
def shard_weights(
    pair: Sequence[Sequence[int]], limit: Sequence[int], /
) -> tuple[int, ...] | None: ...
