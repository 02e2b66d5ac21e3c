import base64
import zlib

import polars as pl
import pytest

from schedtrace.present.report.packed import Packed


@pytest.mark.parametrize("differences", [True, False])
def test_numbers_come_back(differences, unpacked):
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


def test_texts_come_back_between_numbers(unpacked):
    packed = Packed()
    packed.add_texts("ids", ["t1-0", "ü", ""])
    packed.add("a", pl.Series([5]))
    assert unpacked(packed) == {"ids": ["t1-0", "ü", ""], "a": [5]}
