"""The levels that are best for values drawn from a normal distribution (Max 1960, Lloyd 1982).

Each is the mean of the values that are nearer to it than to any other. They are written down, since
logarithms and error functions differ between machines in their last bit.
"""

UNIT = 4096
"""How many units make one root mean square. Levels are in these units."""

NORMAL_LEVELS = {
    14: (597, 1808, 3074, 4447, 6011, 7940, 10752),
    64: (
        *(137, 410, 685, 960, 1237, 1516, 1797, 2081, 2368, 2659, 2955, 3256, 3564, 3878, 4199),
        *(4530, 4871, 5223, 5589, 5971, 6370, 6791, 7237, 7714, 8229, 8791, 9414, 10120, 10943),
        *(11948, 13271, 15334),
    ),
}
"""By the number of levels: those above zero, in rising order. Below zero are as many, mirrored."""
