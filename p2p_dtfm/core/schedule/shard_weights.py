"""How large a part of a segment each holder owns, so that all links between holders are busy.

Holder a owns a fraction w_a of the segment. The link a -> b carries b's part of a's gradient and
then a's part of the sum: w_a + w_b of the segment, in either direction. With T the time per byte of
the segment, every pair asks for w_a + w_b <= T * rate(a, b). Writing v = w / T: the larger sum(v),
the sooner all is done, subject to v_a + v_b <= rate(a, b).

The v grow together until a pair (or a peer's own limit) binds and stops one peer; then the others
grow on. This is max-min fair filling (Bertsekas and Gallager 1992, section 6.5.2). Fairness alone
is not best: beside one peer that is slow to everybody, all stop at half of its rate. If the slow
peer owned nothing, the others could have all of that rate. So fillings in which the peers with the
slowest links come last are tried too, and the best counts. Over random groups of 3 to 32 holders it
is within 3% of the optimum (by linear programming) on average, while the plain filling takes a
quarter longer.

Integers only, so that every holder computes the same parts. `_weights.c` is the same in C: its
`shard_weights` is fifty (64 holders) to a hundred times (3) as fast. Both give equal results for
equal arguments.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

try:
    from p2p_dtfm.core.schedule import _weights
except ImportError:  # no C compiler when this was installed
    _weights = None  # type: ignore[assignment]
_compiled_fair = getattr(_weights, "fair_weights", None)
"""None where `_weights` is missing or was built from an older source."""

EXACT_HOLDERS_LIMIT = 64
"""With more holders, fillings are rough."""
EVEN = 256
"""Fillings within one part in so many of the best one count as equal. The first of them is taken,
which is the most even."""
FILLINGS = 3
"""Fillings tried besides the plain one; a rough filling chooses them."""
_UNLIMITED = 1 << 50
_PERCENTS = (100, 85, 70)
"""Percents of the highest rate that own limits allow, for each of which limits are divided."""

Rows = Sequence[Sequence[int]]


def fair_weights(pair: Rows, limit: Sequence[int], compiled: bool = True) -> tuple[int, ...]:
    """Positive weights by the plain filling, one for each of two or more holders.

    `pair[a][b]` is the lower rate of the two directions in bytes/s; where a = b it is ignored.
    `limit[a]` is the lesser of a's uplink and downlink. Time: h^2 log h. `compiled` is as in
    `shard_weights`.
    """
    if compiled and _compiled_fair is not None:
        found: tuple[int, ...] | None = _compiled_fair(pair, limit)
        if found is not None:
            return found
    rows = _without_diagonal(pair)
    return _Filler(rows, list(range(len(rows)))).filling(next(_own_rates(limit)), 0)


def shard_weights(pair: Rows, limit: Sequence[int], compiled: bool = True) -> tuple[int, ...]:
    """Positive weights by the filling that makes one segment alone go fastest.

    Arguments are as in `fair_weights`; it takes a few times as long. `compiled`: use the compiled
    twin, which leaves groups of more than `EXACT_HOLDERS_LIMIT` holders to this code.
    """
    if compiled and _weights is not None:
        found: tuple[int, ...] | None = _weights.shard_weights(pair, limit)
        if found is not None:
            return found
    rows = _without_diagonal(pair)
    plain, *others = _own_rates(limit)
    filler = _Filler(rows, sorted(range(len(limit)), key=lambda a: (sum(rows[a]), a)))
    tried = list(filler.fillings(plain))
    last = max(tried, key=lambda each: _rate(each[1], rows, limit))[0]
    for size in dict.fromkeys((0, last)) if others else ():
        tried += [(size, filler.filling(own, size)) for own in others]
    rates = [_rate(values, rows, limit) for _, values in tried]
    enough = max(rates) - max(rates) // EVEN
    return next(values for (_, values), rate in zip(tried, rates, strict=True) if rate >= enough)


def _without_diagonal(pair: Rows) -> list[list[int]]:
    rows = [list(row) for row in pair]
    for at, row in enumerate(rows):
        row[at] = _UNLIMITED
    return rows


def _own_rates(limit: Sequence[int]) -> Iterator[list[int]]:
    """How much each holder may own at most, in bytes/s of the segment; several such lists.

    With h holders a peer sends 1 + (h - 2) w of the segment: its gradient, and its sums to all but
    itself. So a segment that goes at the rate V leaves (limit - V) / (h - 2) to own.
    """
    count = len(limit)
    yield [max(1, each // (2 * (count - 1))) for each in limit]
    if count > 2 and min(limit) < _UNLIMITED:
        most = min(min(limit), sum(limit) // (2 * count - 2))
        for percent in _PERCENTS:
            rate = most * percent // 100
            yield [max(1, (each - rate) // (count - 2)) for each in limit]


class _Filler:
    """Fillings of one group. `order` begins with the peers that have the slowest links."""

    def __init__(self, rows: Rows, order: list[int]) -> None:
        self.rows = rows
        self.order = order
        self.count = len(order)
        self.shares: list[list[tuple[int, int]]] = []
        if self.count <= EXACT_HOLDERS_LIMIT:
            self.shares = [sorted((rate // 2, b) for b, rate in enumerate(row)) for row in rows]

    def fillings(self, own: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(how many peers come last, values), for none and for the most promising numbers."""
        sizes = [0]
        while sizes[-1] < self.count - 1:
            sizes.append(min(self.count - 1, sizes[-1] + 1 + sizes[-1] // 3))
        rough = self._rough(own, sizes)
        promising = sorted(rough, key=lambda size: (-sum(rough[size]), size))
        if self.count > EXACT_HOLDERS_LIMIT:
            yield promising[0], rough[promising[0]]
            return
        for size in dict.fromkeys([0, *promising[:FILLINGS]]):
            yield size, self._filled(own, self.order[:size])

    def filling(self, own: list[int], last: int) -> tuple[int, ...]:
        """The filling in which the first `last` peers of the order come last."""
        if self.count > EXACT_HOLDERS_LIMIT:
            return self._rough(own, [last])[last]
        return self._filled(own, self.order[:last])

    def _rough(self, own: list[int], sizes: list[int]) -> dict[int, tuple[int, ...]]:
        """Rough fillings by how many peers come last. These own nothing, the others what their
        slowest pair allows."""
        pick = itemgetter(*self.order)
        values = {size: [1] * self.count for size in sizes}
        for place, peer in enumerate(self.order):
            row, most = pick(self.rows[peer]), own[peer]
            runs = [min(row[a:b]) for a, b in pairwise([*sizes, self.count])]
            least = min(row[: sizes[0]], default=_UNLIMITED)
            rest = [min(runs[at:]) for at in range(len(runs))]
            for at, size in enumerate(sizes):
                if size > place:
                    break
                values[size][peer] = max(1, min(most, least, rest[at] // 2))
                least = min(least, runs[at])
        return {size: tuple(each) for size, each in values.items()}

    def _filled(self, own: list[int], last: list[int]) -> tuple[int, ...]:
        """The max-min fair filling: all but `last` grow first, then `last` get what is left."""
        everyone = range(self.count)
        values = [0] * self.count
        for growing in ([a for a in everyone if a not in last], list(last)):
            still = [b for b in everyone if b not in growing]
            beside = list(own)  # what the peers that do not grow leave
            for a in growing:
                row = self.rows[a]
                beside[a] = min([own[a], *(row[b] - values[b] for b in still)])
            self._grow(values, growing, beside)
        return tuple(max(1, value) for value in values)

    def _grow(self, values: list[int], growing: list[int], beside: list[int]) -> None:
        rows, shares, last = self.rows, self.shares, self.count - 1
        grows = [False] * self.count
        for a in growing:
            grows[a] = True
        at = [0] * self.count

        def room(a: int) -> int:
            shared = shares[a]
            while at[a] < last and not grows[shared[at[a]][1]]:
                at[a] += 1
            share, b = shared[at[a]]
            return min(share, beside[a]) if grows[b] and b != a else beside[a]

        rooms = {a: room(a) for a in growing}
        while growing:
            least = min(growing, key=lambda a: (rooms[a], a))
            value = values[least] = max(0, rooms[least])
            growing.remove(least)
            grows[least] = False
            row = rows[least]
            for a in growing:
                beside[a] = min(beside[a], row[a] - value)
                rooms[a] = max(value, room(a))


def _rate(values: tuple[int, ...], rows: Rows, limit: Sequence[int]) -> int:
    """Bytes/s of the segment through its busiest pair or limit."""
    count, total = len(values), sum(values)
    rate = total
    if count <= EXACT_HOLDERS_LIMIT:
        rate = min(
            row[b] * total // (values[a] + values[b])
            for a, row in enumerate(rows)
            for b in range(a)
        )
    several = count - 2
    return min(
        rate,
        *(each * total // (total + several * v) for each, v in zip(limit, values, strict=True)),
    )
