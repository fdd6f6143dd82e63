"""The order of samples: a permutation in each pass, another one in the next, the same on all
peers."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.schedule.sample_order import sample_index, sample_indices_of

SEEDS = st.integers(0, (1 << 63) - 1)


@given(seed=SEEDS, pass_number=st.integers(0, 1 << 40), sample_count=st.integers(1, 700))
def test_each_pass_is_a_permutation(seed: int, pass_number: int, sample_count: int) -> None:
    order = [sample_index(seed, pass_number, place, sample_count) for place in range(sample_count)]
    assert sorted(order) == list(range(sample_count))


@given(seed=SEEDS, sample_count=st.integers(1 << 40, 1 << 62), data=st.data())
def test_huge_counts_stay_within_range_and_do_not_collide(
    seed: int, sample_count: int, data: st.DataObject
) -> None:
    places = data.draw(st.sets(st.integers(0, sample_count - 1), min_size=2, max_size=20))
    found = {sample_index(seed, 0, place, sample_count) for place in places}
    assert len(found) == len(places)
    assert all(0 <= index < sample_count for index in found)


def test_passes_and_seeds_are_independent() -> None:
    """Two random permutations of 5,000 agree at about one place, and do not keep neighbours."""
    count = 5000
    orders = [
        [sample_index(seed, number, place, count) for place in range(count)]
        for seed, number in ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1))
    ]
    for first in range(len(orders)):
        for second in range(first):
            same = sum(a == b for a, b in zip(orders[first], orders[second], strict=True))
            assert same < 12
    for order in orders:
        steps = [(b - a) % count for a, b in itertools.pairwise(order)]
        assert sum(step == 1 for step in steps) < 12
        # Spearman's rank correlation with the identity: standard deviation 1 / sqrt(count)
        mean = (count - 1) / 2
        covariance = sum((place - mean) * (index - mean) for place, index in enumerate(order))
        assert abs(covariance / (count * (count**2 - 1) / 12)) < 5 / count**0.5


def test_every_index_is_about_equally_likely_at_a_place() -> None:
    counts = [0] * 10
    for seed in range(4000):
        counts[sample_index(seed, 3, 4, 10)] += 1
    chi_squared = sum((count - 400) ** 2 / 400 for count in counts)
    assert chi_squared < 27.9  # 99.9% quantile, 9 degrees of freedom


@pytest.mark.parametrize(("global_batch", "microbatch_size"), [(8, 4), (12, 3), (50, 50), (6, 1)])
def test_every_sample_once_a_pass_over_straddling_batches(
    global_batch: int, microbatch_size: int
) -> None:
    sample_count, passes = 41, 6
    stream = [
        index
        for step in range(-(-sample_count * passes // global_batch))
        for microbatch in range(global_batch // microbatch_size)
        for index in sample_indices_of(
            9, step, microbatch, microbatch_size, global_batch, sample_count
        )
    ]
    orders = set()
    for number in range(passes):
        one_pass = stream[number * sample_count : (number + 1) * sample_count]
        assert sorted(one_pass) == list(range(sample_count))
        orders.add(tuple(one_pass))
    assert len(orders) == passes, "each pass has an order of its own"


def test_the_order_does_not_depend_on_how_a_step_is_divided() -> None:
    whole = sample_indices_of(5, 7, 0, 24, 24, 1000)
    parts = [sample_indices_of(5, 7, number, 3, 24, 1000) for number in range(8)]
    assert tuple(index for part in parts for index in part) == whole


def test_golden_values() -> None:
    """A change here means that old runs can no longer be continued or compared."""
    assert [sample_index(1, 0, place, 10) for place in range(10)] == GOLDEN_TEN
    assert sample_indices_of(123, 10**6, 1, 4, 8, 10**9 + 7) == GOLDEN_HUGE


def test_equal_in_another_process_with_another_hash_seed() -> None:
    program = (
        "from p2p_dtfm.core.schedule.sample_order import sample_indices_of as s;"
        "print(list(s(123, 10**6, 1, 4, 8, 10**9 + 7)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == str(list(GOLDEN_HUGE))


def test_a_position_outside_the_pass_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        sample_index(1, 0, 10, 10)


GOLDEN_TEN = [0, 6, 1, 9, 8, 7, 2, 3, 4, 5]
GOLDEN_HUGE = (808259578, 648236986, 653432428, 985704347)
