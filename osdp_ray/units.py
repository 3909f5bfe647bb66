"""The only place where bytes become GiB and seconds become ms: parsing what a user typed, and printing."""

import math
import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_BYTES_PER_UNIT = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
}
_S_PER_UNIT = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS_PER_UNIT = {"bit": 1, "kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
_FLOPS_PER_UNIT = {"MFLOP/s": 10**6, "GFLOP/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(text: str) -> int:
    """Bytes of a size with its unit, such as '300MiB' or '16 GiB'.

    Decimal units (kB, MB, GB, TB) and binary ones (KiB, MiB, GiB, TiB) are told apart.
    Raises ValueError for a bare number, an unknown unit or anything that is no size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no size with a unit; write it like 300MiB or 16GiB")
    number, unit = match.groups()
    factor = _BYTES_PER_UNIT.get(unit.upper())
    if factor is None:
        raise ValueError(f"{unit!r} in {text!r} is no unit of size; use B, KiB, MiB, GiB, TiB (or kB, MB, GB, TB)")
    return round(float(number) * factor)


def parse_bytes_per_s(text: str) -> float:
    """Bytes per second of a rate such as '300GB/s', '12.5 GiB/s' or '100Gbit/s'. Raises ValueError."""
    amount, slash, second = text.strip().rpartition("/")
    match = _SIZE.fullmatch(amount)
    if not slash or second != "s" or match is None:
        raise ValueError(f"{text!r} is no rate with a unit; write it like 300GB/s or 100Gbit/s")
    if match[2] in _BITS_PER_UNIT:
        return float(match[1]) * _BITS_PER_UNIT[match[2]] / 8
    if match[2].endswith("b"):  # a size may be written so, but a rate of 100Gb/s is one of bits to most people
        raise ValueError(f"{match[2]!r} in {text!r} may mean bits or bytes; write it like 300GB/s or 100Gbit/s")
    return float(parse_bytes(amount))


def parse_seconds(text: str) -> float:
    """Seconds of a duration such as '4us', '1.5 ms'. Raises ValueError."""
    return _parse_with(text, _S_PER_UNIT, "duration", "4us or 1.5ms")


def parse_flops_per_s(text: str) -> float:
    """Floating-point operations per second of a rate such as '312TFLOP/s'. Raises ValueError."""
    return _parse_with(text, _FLOPS_PER_UNIT, "arithmetic rate", "19.5TFLOP/s")


def _parse_with(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]+)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no {what} with a unit; write it like {example}")
    if match[2] not in units:
        raise ValueError(f"{match[2]!r} in {text!r} is no unit of {what}; use {', '.join(units)}")
    return float(match[1]) * units[match[2]]


def format_bytes(num_bytes: float) -> str:
    """A size for people: '0 B', '512 B', '1.50 KiB', '47.80 MiB', '16.00 GiB'."""
    magnitude = abs(num_bytes)
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if magnitude >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_bytes_up(num_bytes: int) -> str:
    """A size that a user can type back, rounded up so that it is never too small: '18.41GiB'."""
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= factor:
            hundredths = -(-num_bytes * 100 // factor)
            return f"{hundredths // 100}.{hundredths % 100:02d}{unit}"
    return f"{num_bytes}B"


def format_seconds(seconds: float) -> str:
    """A duration for people: '850 us', '12.3 ms', '4.21 s', '3 min 05 s'."""
    if math.isnan(seconds) or math.isinf(seconds):
        return str(seconds)
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.1f} ms"
    if abs(seconds) < 120:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def format_percent(fraction: float) -> str:
    """A fraction for people: '4.2 %'."""
    return f"{fraction * 100:.1f} %"
