"""Equal values give equal bytes; floats are never hashed; strangers' bytes are bounded."""

import contextlib
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.protocol.canonical import decode, digest, digest_bytes, encode
from p2p_dtfm.core.protocol.errors import PeerFault

keys = st.text(max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


class Pair(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    number: int


@given(st.dictionaries(keys, plain, max_size=6), st.randoms())
def test_the_order_in_which_a_map_was_filled_does_not_show(values: dict, random) -> None:
    shuffled = list(values.items())
    random.shuffle(shuffled)
    assert encode(dict(shuffled)) == encode(values)
    assert digest(dict(shuffled)) == digest(values)


@given(plain, plain)
def test_different_values_have_different_digests(left: object, right: object) -> None:
    assert (digest(left) == digest(right)) == (encode(left) == encode(right))


@pytest.mark.parametrize(
    "value",
    [0.5, [1, 2.0], {"a": {"b": [float("nan")]}}, {1.5: "key"}, (1, (2, 3.0))],
    ids=str,
)
def test_a_float_anywhere_never_reaches_a_digest(value: object) -> None:
    with pytest.raises(AssertionError, match="float"):
        digest(value)


def test_a_float_in_a_struct_never_reaches_a_digest() -> None:
    class Measured(msgspec.Struct):
        seconds: float

    with pytest.raises(AssertionError, match="float"):
        digest({"inner": Measured(1.0)})


def test_bytes_over_the_limit_are_not_even_decoded() -> None:
    payload = encode(Pair("x" * 100, 1))
    assert decode(payload, Pair, limit_bytes=len(payload)).number == 1
    with pytest.raises(PeerFault, match="more than the limit"):
        decode(payload, Pair, limit_bytes=len(payload) - 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode({"name": "a"}),
        encode({"name": "a", "number": "7"}),
        encode({"name": "a", "number": 1.5}),
        encode({"name": "a", "number": 1, "more": 2}),
        encode(["a", 1]),
        encode(Pair("a", 1)) + b"\x00",
        encode(Pair("a", 1))[:-1],
        b"\x91" * 5000 + b"\x01",
        b"\x82\xa4name\xa2\xff\xfe\xa6number\x01",
    ],
    ids=lambda payload: payload[:12].hex() or "empty",
)
def test_what_is_not_exactly_the_expected_type_is_the_senders_fault(payload: bytes) -> None:
    with pytest.raises(PeerFault, match="not a valid Pair"):
        decode(payload, Pair)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_fault(payload: bytes) -> None:
    with contextlib.suppress(PeerFault):
        decode(payload, Pair)


def test_a_bomb_of_nested_lists_is_a_fault_and_no_crash() -> None:
    with pytest.raises(PeerFault):
        decode(b"\x91" * 500_000, list)


def test_digests_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from p2p_dtfm.core.protocol.canonical import digest;"
        "print(digest({k: [1] for k in {'b', 'a', 'c', 'd', 'e'}}))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(seen) == 1


def test_the_digest_is_blake2b_256() -> None:
    # RFC 7693's function with 32 bytes of output, over no input
    assert digest_bytes(b"") == "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"
