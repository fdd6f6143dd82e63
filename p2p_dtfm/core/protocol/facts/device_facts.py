"""What a peer's device is, beside how long a layer takes on it: for people, and for guarding."""

import msgspec

TEXT_LIMIT = 64


class DeviceFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Measured or read on the machine; 0 or empty: not known, or there is no such thing."""

    memory_bytes: int
    """Of the device, whoever uses it."""
    host_bytes: int
    """Of the machine's memory."""
    host_free_bytes: int
    """Of it, what layers of others may take beside the device's own work."""
    fp32_mflops: int
    """Million operations per second that a large product of matrices ran at."""
    bf16_mflops: int
    capability: str
    """As CUDA counts them ("8.6"), or the vector unit of a processor."""
    driver: str
    torch: str
    host_bytes_per_s: int
    """Between this machine's memory and the device's, the slower direction."""


def fault_of_facts(facts: DeviceFacts) -> str | None:
    """Why they cannot be, or None."""
    texts = (facts.capability, facts.driver, facts.torch)
    if any(len(text) > TEXT_LIMIT or not text.isprintable() for text in texts):
        return "a device's facts in words that are too long, or no words"
    values = (getattr(facts, name) for name in facts.__struct_fields__)
    if any(not 0 <= value < 1 << 60 for value in values if isinstance(value, int)):
        return "a device's number below 0 or above 2^60"
    return None
