"""Numbers that make Python's dictionaries slow, for tests of what a stranger could send."""

import random

CROWDED_BELOW = 1 << 24


def crowded_numbers(table_bits: int = 16) -> list[int]:
    """Returns as many numbers as fit in a table of so many bits. Each takes thousands of probes
    until it finds a place: the first ones fill one way through the table, and all others begin
    somewhere on it."""
    size = 1 << table_bits
    way, place, taken = [0] * size, [0] * size, bytearray(size)
    slot, filled = 0, int(0.4 * size)
    for step in range(size):
        way[step], place[slot], taken[slot] = slot, step, step < filled
        slot = (5 * slot + 1) % size
    numbers, chance = way[:filled], random.Random(1)
    seen = set(numbers)
    while len(numbers) < 0.65 * size:
        number = left = chance.randrange(CROWDED_BELOW)
        slot = number % size
        while left and taken[slot]:
            left >>= 5
            slot = (5 * slot + left + 1) % size
        if taken[slot] and place[slot] < filled // 4 and number not in seen:
            seen.add(number)
            taken[way[len(numbers)]] = True
            numbers.append(number)
    return numbers
