from collections.abc import Sequence

def shard_weights(
    pair: Sequence[Sequence[int]], limit: Sequence[int], /
) -> tuple[int, ...] | None: ...
