"""Amounts as people read them, alike on all screens: the page's `format.js` does the same.

Bytes in memory, on disk or on the way are in binary units, as the options are (`--memory-gib`).
Links are in bits a second, as they are sold. Figures have three digits; times have two units.
"""

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_BIT_UNITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s")


def bytes_text(size_bytes: int, *, rounded_up: bool = False) -> str:
    """`24.1 GiB`. `rounded_up` never says too little, for an amount that must be there."""
    return _scaled(size_bytes, 1024, _BYTE_UNITS, rounded_up)


def rate_text(bytes_per_s: int) -> str:
    """`25.0 Mbit/s`, of a link that carries so many bytes a second."""
    return _scaled(8 * bytes_per_s, 1000, _BIT_UNITS, False)


def counted(count: float, one: str) -> str:
    """`1 step`, `2 steps`, `1,000 microbatches`, `2 processes`."""
    text = f"{count:,.0f}"
    return f"{text} {one if text == '1' else one + ('es' if one.endswith(('ch', 'ss')) else 's')}"


def layers_text(first: int, end: int) -> str:
    """`layers 3-5`, `layer 2`: of a range that ends before `end`."""
    return f"layer{'' if end - first == 1 else 's'} {span_text(first, end)}"


def span_text(first: int, end: int) -> str:
    """`3-5`, `2`: of a range that ends before `end`."""
    return f"{first}" if end - first == 1 else f"{first}-{end - 1}"


def given_text(today: float, ever: float, repeated: float) -> str | None:
    """`900 tokens today, 12,000 ever, of which 300 repeated`; None before the first one."""
    if round(ever) < 1:
        return None
    again = f", of which {repeated:,.0f} repeated" if round(repeated) else ""
    return f"{counted(today, 'token')} today, {ever:,.0f} ever{again}"


def share_text(share: float) -> str:
    """`37%`; less than all never becomes `100%`."""
    return f"{share if share >= 1 else min(share, 0.99):.0%}"


def duration(seconds: float | None) -> str:
    """`11 days 22 h`, `2 h 5 min`, `5 min 1 s`, `12 s`; days from two days on. A negative duration,
    as of a clock that was set back, is `0 s`."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{counted(hours // 24, 'day')} {hours % 24} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _scaled(value: int, step: int, units: tuple[str, ...], rounded_up: bool) -> str:
    size, at, unit = abs(value), 0, 1
    while at < len(units) - 1 and _rounded(size, unit, 1, rounded_up) >= step:
        at, unit = at + 1, unit * step
    sign = "-" if value < 0 else ""
    if not at:
        return f"{sign}{size:,} {units[0]}"
    whole = size // unit
    places = 0 if whole >= 100 else 1 if whole >= 10 else 2
    digits = _rounded(size, unit, 10**places, rounded_up)
    fraction = f".{digits % 10**places:0{places}d}" if places else ""
    return f"{sign}{digits // 10**places:,}{fraction} {units[at]}"


def _rounded(size: int, unit: int, scale: int, up: bool) -> int:
    """`size` in parts of a unit, which has `scale` parts."""
    return -(-size * scale // unit) if up else (2 * size * scale + unit) // (2 * unit)
