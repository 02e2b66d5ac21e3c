import base64
import zlib

import polars as pl
import pytest

from schedtrace.present.report.packed import Packed


def unpacked(packed):
    """What the page's script does, value by value."""
    raw = zlib.decompress(base64.b64decode(packed.text()), -zlib.MAX_WBITS)
    columns, at = {}, 0
    for name, count, written in packed.directory:
        if written == "texts":
            columns[name] = raw[at : at + count].decode().split("\0")
            at += count
            continue
        values = []
        for _ in range(count):
            code = shift = 0
            while True:
                byte = raw[at]
                at += 1
                code |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            value = -(code + 1) // 2 if code % 2 else code // 2
            values.append(value + values[-1] if written == "differences" and values else value)
        columns[name] = values
    assert at == len(raw)
    return columns


@pytest.mark.parametrize("differences", [True, False])
def test_numbers_come_back(differences):
    numbers = [0, 1, -1, 63, 64, -64, -65, 8191, 8192, 1 << 40, -(1 << 40), 7, None]
    packed = Packed()
    packed.add("a", pl.Series(numbers, dtype=pl.Int64), differences=differences)
    packed.add("none", pl.Series([], dtype=pl.Int64))
    packed.add("yes", pl.Series([True, False]))
    assert unpacked(packed) == {"a": [*numbers[:-1], -1], "none": [], "yes": [1, 0]}


def test_bytes_are_varints_of_zigzag_codes():
    packed = Packed()
    packed.add("a", pl.Series([0, -1, 1, 64, 65]), differences=True)
    # differences 0, -1, 2, 63, 1: codes 0, 1, 4, 126, 2
    assert zlib.decompress(base64.b64decode(packed.text()), -zlib.MAX_WBITS) == bytes([0, 1, 4, 126, 2])
    packed = Packed()
    packed.add("a", pl.Series([64, 8192]), differences=False)  # codes 128 and 16,384
    assert zlib.decompress(base64.b64decode(packed.text()), -zlib.MAX_WBITS) == bytes([128, 1, 128, 128, 1])


def test_texts_come_back_between_numbers():
    packed = Packed()
    packed.add_texts("ids", ["t1-0", "ü", ""])
    packed.add("a", pl.Series([5]))
    assert unpacked(packed) == {"ids": ["t1-0", "ü", ""], "a": [5]}
