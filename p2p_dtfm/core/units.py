"""What is counted in nanoseconds everywhere."""

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000
