"""Sizes and durations: what a user may type, and what is printed."""

import pytest

from osdp_ray.units import (
    GIB,
    MIB,
    format_bytes,
    format_bytes_up,
    format_percent,
    format_seconds,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("300MiB", 300 * MIB),
        ("16 GiB", 16 * GIB),
        (" 1.5gib ", 3 * GIB // 2),
        ("2GB", 2 * 10**9),
        ("7kB", 7000),
        ("0B", 0),
        ("1TiB", 1024 * GIB),
    ],
)
def test_a_size_with_a_unit_is_read_and_decimal_units_are_told_from_binary_ones(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["300", "", "MiB", "-1GiB", "1e3MiB", "1,5GiB", "NaN GiB", "1 2GiB"])
def test_what_is_no_size_with_a_unit_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="write it like 300MiB or 16GiB"):
        parse_bytes(text)


def test_an_unknown_unit_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'Gibi' in '3Gibi' is no unit of size; use B, KiB"):
        parse_bytes("3Gibi")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.50 KiB"),
        (50121933, "47.80 MiB"),
        (16 * GIB, "16.00 GiB"),
        (-MIB, "-1.00 MiB"),
    ],
)
def test_sizes_are_printed_in_binary_units(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize("num_bytes", [1, 1023, 1025, 18 * GIB + 1, 47 * MIB + 12345, GIB - 1, 10 * GIB + GIB // 100])
def test_a_size_rounded_up_can_be_typed_back_and_is_never_too_small_nor_one_percent_too_large(num_bytes):
    typed = parse_bytes(format_bytes_up(num_bytes))
    assert num_bytes <= typed <= num_bytes * 1.01 + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00085, "850 us"),
        (0.0123, "12.3 ms"),
        (4.214, "4.21 s"),
        (185.2, "3 min 05 s"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_durations_are_printed_with_three_digits(seconds, text):
    assert format_seconds(seconds) == text


def test_fractions_are_printed_as_percent():
    assert format_percent(0.0421) == "4.2 %"
