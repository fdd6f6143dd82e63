"""How far off codecs are, how many bytes they take, what malformed bytes do, and that nothing else
matters."""

import hashlib
import math
import random
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.run_spec import CodecSpec, RunSpec, SparseSpec
from p2p_dtfm.core.protocol.workload import CODEC_BYTES_PER_KIBI
from p2p_dtfm.train.codecs import Codec, Turn, codec_of
from p2p_dtfm.train.codecs.dense import INT8_BLOCK
from p2p_dtfm.train.codecs.digits import Digits
from p2p_dtfm.train.codecs.normal_levels import NORMAL_LEVELS, UNIT
from p2p_dtfm.train.codecs.packing import pack, unpack
from p2p_dtfm.train.codecs.selection import selected_count, selected_indices
from p2p_dtfm.train.codecs.sign import BLOCK as SIGN_BLOCK
from p2p_dtfm.train.codecs.subspace import Subspace, require_directions

DENSE = ["fp32", "fp16", "bf16", "int8"]
ROTATED = ["rotated4", "rotated6"]
ALL = [*DENSE, *ROTATED, "subspace", "sparse", "sign"]
SPARSE = CodecSpec(sparse=SparseSpec(one_in=5, keep_percent=30, bits=4))
TURN = Turn(place=(1 << 63) + 12345, step=17)

counts = st.integers(0, 2000)
seeds = st.integers(0, 1 << 30)
exponents = st.integers(-30, 30)
sparse_specs = st.builds(
    SparseSpec,
    one_in=st.integers(1, 70),
    keep_percent=st.integers(1, 100),
    bits=st.sampled_from([1, 2, 4, 8]),
)


def numbers(count: int, seed: int = 0, exponent: int = 0) -> Tensor:
    """Normal values, some a thousand times larger, some zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * 2.0**exponent
    kinds = torch.rand(count, generator=generator)
    return torch.where(kinds < 0.02, values * 1000, torch.where(kinds > 0.9, 0.0, values))


def there_and_back(codec: Codec, values: Tensor, turn: Turn = TURN) -> Tensor:
    payload = bytes(codec.encode(values, turn))
    assert len(payload) == codec.payload_bytes(values.numel())
    decoded = codec.decode(payload, tuple(values.shape), turn)
    assert decoded.dtype == torch.float32 and decoded.shape == values.shape
    return decoded


@given(counts, seeds, exponents)
def test_dense_codecs_are_within_their_error(count: int, seed: int, exponent: int) -> None:
    values = numbers(count, seed, exponent)
    assert torch.equal(there_and_back(codec_of("fp32", SPARSE), values), values)
    largest = float(values.abs().amax()) if count else 0.0
    bounds = {
        "bf16": values.abs() * 2.0**-8,
        "fp16": values.abs() * 2.0**-11 + largest * 2.0**-38,
    }
    for name, bound in bounds.items():
        error = (there_and_back(codec_of(name, SPARSE), values) - values).abs()
        assert bool((error <= bound).all()), name
    error = (there_and_back(codec_of("int8", SPARSE), values) - values).abs()
    for start in range(0, count, INT8_BLOCK):
        block = slice(start, start + INT8_BLOCK)
        step = float(values[block].abs().amax()) / 127
        assert float(error[block].max()) <= step * 0.5001 + 2.0**-149


@given(counts, seeds, sparse_specs, st.integers(0, 1 << 40))
@example(7, 1, SparseSpec(one_in=1, keep_percent=100, bits=1), 0)
def test_sparse_sends_the_largest_of_the_selected(
    count: int, seed: int, spec: SparseSpec, step: int
) -> None:
    codec = codec_of("sparse", CodecSpec(sparse=spec))
    values, turn = numbers(count, seed), Turn(seed, step)
    decoded = there_and_back(codec, values, turn)
    selected = torch.zeros(count, dtype=torch.bool)
    selected[selected_indices(count, spec.one_in, turn)] = True
    assert not decoded[~selected].any()
    kept = math.ceil(math.ceil(count / spec.one_in) * spec.keep_percent / 100)
    least = values[selected].abs().sort(descending=True).values[:kept][-1:]
    far = values.abs() > (float(least) if count else 0.0)
    largest = float(values.abs().amax()) if count else 0.0
    step_limit = largest / (2 ** (spec.bits - 1) - 1) if spec.bits > 2 else 2 * largest
    error = (decoded - values).abs()
    assert bool((error[selected & far] <= 0.5001 * step_limit).all())
    if spec.bits > 2:
        assert bool((error[selected & ~far] <= float(least) * 1.0001).all() if count else True)
    elif spec.keep_percent == 100 and count:
        lost, sent = error[selected].double(), values[selected].double()
        due = float(sent.square().sum())
        assert float(lost.square().sum()) <= 1.01 * due, "hardly more is owed than was due"


def test_every_element_has_its_turn() -> None:
    count, one_in = 1003, 8
    seen = torch.zeros(count, dtype=torch.int64)
    for step in range(40, 40 + one_in):
        indices = selected_indices(count, one_in, Turn(99, step))
        assert indices.numel() == selected_count(count, one_in)
        assert bool((indices.diff() > 0).all()) and indices[0] >= 0 and indices[-1] < count
        seen[indices] += 1
    assert bool((seen[: count // one_in * one_in] == 1).all()) and bool((seen >= 1).all())
    firsts = selected_indices(8 * 4000, 8, Turn(99, 0)) % 8
    assert firsts.bincount(minlength=8).tolist() == pytest.approx([500] * 8, abs=100)
    others = selected_indices(8 * 4000, 8, Turn(100, 0)) % 8
    assert 300 < int((firsts == others).sum()) < 700, "another place, another choice"


def test_selection_and_bytes_are_the_same_for_ever() -> None:
    """Peers of another version, library or device must select and write the same."""
    assert selected_indices(40, 8, Turn(1, 0)).tolist() == [1, 12, 17, 27, 36]
    payload = bytes(codec_of("sparse", SPARSE).encode(numbers(60, 3), Turn(1, 2)))
    assert payload.hex() == "010000000cae053f003a253e1a04ffc0"


@pytest.mark.parametrize("name", [name for name in ALL if name != "subspace"])
def test_threads_do_not_matter(name: str) -> None:
    values = numbers(300_000, 5)
    found = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            codec = codec_of(name, SPARSE)
            payload = bytes(codec.encode(values, TURN))
            found.add((payload, bytes(codec.decode(payload, (300_000,), TURN).numpy())))
    finally:
        torch.set_num_threads(1)
    assert len(found) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in ALL if name != "subspace"])
def test_devices_do_not_matter(name: str) -> None:
    codec, values = codec_of(name, SPARSE), numbers(300_001, 6)
    payload = bytes(codec.encode(values, TURN))
    assert payload == bytes(codec.encode(values.cuda(), TURN))
    there = codec.decode(payload, (300_001,), TURN, "cuda")
    assert torch.equal(there.cpu(), codec.decode(payload, (300_001,), TURN))


def test_ties_are_kept_from_the_front() -> None:
    spec = CodecSpec(sparse=SparseSpec(one_in=1, keep_percent=30, bits=8))
    values = torch.tensor([1.0, -2.0, 2.0, 1.0, -1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    decoded = there_and_back(codec_of("sparse", spec), values)
    assert decoded.tolist() == [1.0, -2.0, 2.0, *[0.0] * 7]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_divergence_is_not_hidden(name: str, wrong: float) -> None:
    spec = CodecSpec(sparse=SparseSpec(one_in=1, keep_percent=10))
    values = numbers(1000, 1)
    values[500] = wrong
    assert not math.isfinite(float(there_and_back(codec_of(name, spec), values).sum()))


@pytest.mark.parametrize("name", [*DENSE, "sparse"])
def test_extreme_values(name: str) -> None:
    spec = CodecSpec(sparse=SparseSpec(one_in=1, keep_percent=100, bits=8))
    codec = codec_of(name, spec)
    for largest in (3.3e38, 1.2e-38, 1e-44, 0.0):
        values = torch.linspace(-1, 1, 301) * largest
        decoded = there_and_back(codec, values)
        assert bool(decoded.isfinite().all())
        assert float((decoded - values).abs().amax()) <= largest / 100 + 2e-43


@given(counts, seeds, exponents)
@example(1024, 0, 0)
def test_signs_have_their_blocks_mean_magnitude(count: int, seed: int, exponent: int) -> None:
    codec, values = codec_of("sign", SPARSE), numbers(count, seed, exponent)
    decoded = there_and_back(codec, values)
    assert codec.payload_bytes(1 << 20) * 8 < 1.032 * (1 << 20)
    for start in range(0, count, SIGN_BLOCK):
        block, found = values[start : start + SIGN_BLOCK], decoded[start : start + SIGN_BLOCK]
        mean = float(block.abs().double().mean())
        assert float(found.abs().amax()) == float(found.abs().amin())
        assert float(found[0].abs()) == pytest.approx(mean, rel=2.0**-8, abs=1e-38)
        assert bool(((found < 0) == (block < 0))[found != 0].all())
        lost, due = (block - found).double(), block.double()
        assert float(lost.square().sum()) <= 1.001 * float(due.square().sum()) + 1e-70


def test_signs_of_extreme_values_and_the_same_bytes_for_ever() -> None:
    codec = codec_of("sign", SPARSE)
    for largest in (3.4e38, 1e-44, 0.0):
        assert bool(there_and_back(codec, torch.linspace(-1, 1, 700) * largest).isfinite().all())
    assert bool(there_and_back(codec, torch.full((600,), 3.4e38)).isfinite().all())
    payload = bytes(codec.encode(numbers(20, 3)))
    assert payload.hex() == "010000009441458800"
    with pytest.raises(PeerFault, match="negative magnitude"):
        codec.decode(b"\1\0\0\0\0\xbf\0", (8,))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ALL), st.integers(0, 700), st.randoms(use_true_random=False))
def test_malformed_bytes_are_the_senders_fault(
    name: str, count: int, chance: random.Random
) -> None:
    codec = codec_of(name, SPARSE)
    payload = bytearray(codec.encode(numbers(count), TURN))
    for _ in range(chance.randint(0, 4)):
        if payload:
            payload[chance.randrange(len(payload))] = chance.randrange(256)
    change = chance.choice(["none", "cut", "more"])
    if change == "cut":
        payload = payload[: chance.randint(0, len(payload))]
    elif change == "more":
        payload += bytes(chance.randint(1, 9))
    try:
        decoded = codec.decode(payload, (count,), TURN)
    except PeerFault:
        return
    assert len(payload) == codec.payload_bytes(count), "another length must be refused"
    assert decoded.shape == (count,)


def test_what_no_correct_peer_writes_is_named() -> None:
    int8, sparse, fp16 = (codec_of(name, SPARSE) for name in ("int8", "sparse", "fp16"))
    good = bytearray(int8.encode(numbers(200)))
    for place, value, reason in ((0, 9, "version 9"), (7, 0xBF, "negative step")):
        bad = bytearray(good)
        bad[place] = value
        with pytest.raises(PeerFault, match=reason):
            int8.decode(bad, (200,))
    bad = bytearray(sparse.encode(numbers(200), TURN))
    bad[4 + 8] ^= 0xFF
    with pytest.raises(PeerFault, match="elements where 12 are due"):
        sparse.decode(bad, (200,), TURN)
    bad = bytearray(fp16.encode(numbers(4)))
    bad[7] = 0x40
    with pytest.raises(PeerFault, match="exponent"):
        fp16.decode(bad, (4,))
    with pytest.raises(PeerFault, match="32 are due for 8"):
        codec_of("fp32", SPARSE).decode(b"1234", (2, 4))


@pytest.mark.parametrize(
    ("name", "bits", "lost"), [("rotated4", 3.876, 0.02), ("rotated6", 6.07, 1.2e-3)]
)
@pytest.mark.parametrize("unbiased", [False, True])
def test_rotations_lose_little_whatever_the_values(
    name: str, bits: float, lost: float, unbiased: bool
) -> None:
    """The encoding takes as many bytes for each value as plans count, except for the head."""
    codec, turn = codec_of(name, SPARSE), TURN._replace(unbiased=unbiased)
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(192, 128, generator=generator)
    few = torch.where(torch.rand(192, 128, generator=generator) < 0.02, 1000 * normal, normal)
    for values in (normal, few, normal * 2.0 ** -torch.arange(0, 192)[:, None].float().fmod(12)):
        error = (there_and_back(codec, values, turn) - values).square().sum()
        assert float(error) < lost * float(values.square().sum())
    assert 8 * codec.payload_bytes(1 << 20) < bits * (1 << 20)
    assert codec.payload_bytes(1 << 10) == CODEC_BYTES_PER_KIBI[name] + 8


@settings(deadline=None)
@given(st.integers(1, 700), seeds, exponents)
def test_rotations_of_any_length(count: int, seed: int, exponent: int) -> None:
    values = numbers(count, seed, exponent)
    for name in ROTATED:
        for unbiased in (False, True):
            turn = Turn(seed, 3, unbiased)
            error = (there_and_back(codec_of(name, SPARSE), values, turn) - values).square()
            bound = 0.4 if name == "rotated4" else 0.05
            assert float(error.sum()) <= bound * float(values.square().sum())


@pytest.mark.parametrize("name", ROTATED)
def test_gradients_are_right_on_average_and_activations_nearer(name: str) -> None:
    values = torch.randn(1280, generator=torch.Generator().manual_seed(7))
    codec = codec_of(name, SPARSE)
    found = [there_and_back(codec, values, Turn(5, step, True)) for step in range(400)]
    once = float((found[0] - values).norm())
    assert float((torch.stack(found).mean(dim=0) - values).norm()) < 2 * once / 400**0.5
    nearest = there_and_back(codec, values, Turn(5, 0))
    assert float((nearest - values).norm()) < once
    other = bytes(codec.encode(values, Turn(6, 0)))
    assert (
        other != bytes(codec.encode(values, Turn(5, 0))) != bytes(codec.encode(values, Turn(5, 1)))
    )


@pytest.mark.parametrize("name", ROTATED)
def test_rotations_of_extreme_values(name: str) -> None:
    for largest in (3.3e38, 1.2e-38, 1e-44, 0.0):
        values = torch.linspace(-1, 1, 301) * largest
        decoded = there_and_back(codec_of(name, SPARSE), values)
        assert bool(decoded.isfinite().all())
        assert float((decoded - values).abs().amax()) <= largest / 2 + 2e-44


@pytest.mark.parametrize("unbiased", [False, True])
def test_rotations_have_the_same_bytes_for_ever(unbiased: bool) -> None:
    found = hashlib.blake2b(digest_size=8)
    for name in ROTATED:
        codec, turn = codec_of(name, SPARSE), Turn(1, 2, unbiased)
        payload = bytes(codec.encode(numbers(600, 3), turn))
        found.update(payload + bytes(codec.decode(payload, (600,), turn).numpy()))
    assert found.hexdigest() == ("a1205351184e9faf", "0c0f372d5baedb7c")[unbiased]


@pytest.mark.parametrize("count", NORMAL_LEVELS)
def test_the_levels_are_the_best_of_a_normal_distribution(count: int) -> None:
    normal, half = NormalDist(), [level / UNIT for level in NORMAL_LEVELS[count]]
    levels = [-level for level in reversed(half)] + half
    borders = [-9.0, *((a + b) / 2 for a, b in pairwise(levels)), 9.0]
    for level, (low, high) in zip(levels, pairwise(borders), strict=True):
        mean = (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))
        assert level == pytest.approx(mean, abs=4e-3)


def low_rank(rows: int, width: int, rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    places = torch.randn(rows, rank, generator=generator)
    return places @ torch.randn(rank, width, generator=generator)


@pytest.mark.parametrize("shape", [(4, 48, 128), (2, 32, 32), (1, 40, 200), (3, 7, 64)])
def test_a_subspace_of_what_has_few_directions_loses_next_to_nothing(
    shape: tuple[int, ...],
) -> None:
    codec = Subspace()
    rows, width = math.prod(shape[:-1]), shape[-1]
    rank = codec.rank(rows, width)
    assert 1 <= rank <= min(rows, width)
    values = low_rank(rows, width, rank, 1).view(shape)
    error = (there_and_back(codec, values) - values).square().sum()
    assert float(error) < 5e-3 * float(values.square().sum())
    more = low_rank(rows, width, min(rows, width), 2).view(shape)
    lost = float((there_and_back(codec, more) - more).square().sum() / more.square().sum())
    directions = torch.linalg.svdvals(more.view(rows, width)).square()
    due = float(directions[rank:].sum() / directions.sum())
    assert lost < due + 0.15, "hardly more than what lies outside of the best directions"


def test_a_subspace_takes_as_many_bytes_as_plans_count_and_fewer_directions_for_more_width() -> (
    None
):
    codec = Subspace()
    for count in (1, 1024, 24_576, 786_432):
        due = math.ceil(count * CODEC_BYTES_PER_KIBI["subspace"] / 1024)
        assert codec.payload_bytes(count) == due + 4
    assert codec.rank(192, 128) == 39
    assert codec.rank(1024, 768) == 233
    for rows, width in ((1, 1), (1, 5000), (5000, 1), (64, 64), (1, 0)):
        values = torch.ones(rows, width)
        decoded = there_and_back(codec, values)
        assert bool(decoded.isfinite().all())
        if codec.rank(rows, width):
            assert torch.allclose(decoded, values, atol=0.02)


def test_a_subspace_of_extreme_values_and_the_bytes_that_nobody_writes() -> None:
    codec = Subspace()
    for largest in (3.3e38, 1.2e-38, 1e-44, 0.0):
        values = torch.linspace(-1, 1, 1024).view(8, 128) * largest
        decoded = there_and_back(codec, values)
        assert bool(decoded.isfinite().all())
        assert float((decoded - values).abs().amax()) <= largest / 10 + 2e-38
    good = bytearray(codec.encode(torch.ones(8, 128)))
    for places, value, reason in (
        ([5], 0xFF, "a scale that is none"),
        (range(20, 400), 0xFF, "none of 127"),
        ([0], 2, "version 2"),
    ):
        bad = bytearray(good)
        for place in places:
            bad[place] = value
        with pytest.raises(PeerFault, match=reason):
            codec.decode(bad, (8, 128))


def test_a_subspace_of_wide_rows_that_are_even_but_for_one_channel() -> None:
    """Rounding leaves nothing of the even direction. No place could be found for a basis with such
    a row, and the sender's step never ended."""
    rows, width = 64, 1 << 14
    values = torch.full((rows, width), 1e-3)
    values[:, 7] = numbers(rows) * 1e4
    decoded = there_and_back(Subspace(), values)
    assert float((decoded - values).norm() / values.norm()) < 0.01


@settings(deadline=None)
@given(st.integers(2, 64), st.integers(1, 4), seeds)
def test_digits(base: int, tiles: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, base, (128 * tiles,), generator=generator)
    digits = Digits(base)
    packed = digits.pack(drawn)
    assert packed.numel() == digits.packed_bytes(128 * tiles)
    unpacked = digits.unpack(packed, 128 * tiles)
    assert unpacked is not None and torch.equal(unpacked, drawn)
    assert packed.numel() * 8 < 128 * tiles * (math.log2(base) + 0.13)


def test_numbers_that_no_correct_peer_packs_are_its_fault() -> None:
    codec = codec_of("rotated4", SPARSE)
    good = bytearray(codec.encode(numbers(256)))
    for places, value, reason in (
        (range(10, len(good)), 255, "none of 14"),
        ([6, 7], 9, "exponent"),
        ([0], 2, "version 2"),
    ):
        bad = bytearray(good)
        for place in places:
            bad[place] = value
        with pytest.raises(PeerFault, match=reason):
            codec.decode(bad, (256,))


@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(0, 255), max_size=70))
def test_packing(bits: int, drawn: list[int]) -> None:
    small = torch.tensor([number % (1 << bits) for number in drawn], dtype=torch.uint8)
    packed = pack(small, bits)
    assert packed.numel() == -(-len(drawn) * bits // 8)
    assert torch.equal(unpack(packed, bits, len(drawn)), small)
    assert int.from_bytes(bytes(packed.tolist()), "little") == sum(
        number << (bits * place) for place, number in enumerate(small.tolist())
    )


def test_a_subspace_without_room_for_directions_is_refused_before_a_run_begins() -> None:
    def run(microbatch: int, context: int, width: int) -> RunSpec:
        sizes = {"layers": 2, "width": width, "heads": 2, "context": context, "vocabulary": 256}
        return RunSpec.model_validate(
            {
                "name": "narrow",
                "seed": 1,
                "total_steps": 1,
                "model": sizes,
                "batch": {"global_batch": 2 * microbatch, "microbatch": microbatch},
                "codecs": {"activations": "subspace", "gradients": "rotated4"},
                "data": {"source": "standard-library"},
                "optimizer": {"peak_learning_rate": 1e-3},
            }
        )

    require_directions(run(4, 48, 128))
    with pytest.raises(UserError, match="room for 0 directions of 8 in microbatches of 8 rows"):
        require_directions(run(1, 8, 8))
