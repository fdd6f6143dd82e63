"""What a peer's device is, besides its layers' times: for people, and for guarding."""

import msgspec

TEXT_LIMIT = 64


class DeviceFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Facts measured or read on the machine; 0 or empty where unknown, or where there is none."""

    memory_bytes: int
    """The device's memory, whoever uses it."""
    host_bytes: int
    """The machine's memory."""
    host_free_bytes: int
    """The part of the machine's memory that layers of others may take, beside the device's own
    work."""
    fp32_mflops: int
    """Million operations per second at which a large product of matrices ran."""
    bf16_mflops: int
    capability: str
    """CUDA's compute capability ("8.6"), or the vector unit of a processor."""
    driver: str
    torch: str
    host_bytes_per_s: int
    """The rate between the machine's memory and the device's, in the slower direction."""


def fault_of_facts(facts: DeviceFacts) -> str | None:
    """Why these facts cannot be, or None."""
    texts = (facts.capability, facts.driver, facts.torch)
    if any(len(text) > TEXT_LIMIT or not text.isprintable() for text in texts):
        return "a device's facts in words that are too long, or no words"
    values = (getattr(facts, name) for name in facts.__struct_fields__)
    if any(not 0 <= value < 1 << 60 for value in values if isinstance(value, int)):
        return "a device's number below 0 or above 2^60"
    return None
