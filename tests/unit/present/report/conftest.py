"""What the page's script does with its columns, in Python."""

import base64
import zlib

import pytest


@pytest.fixture
def unpacked():
    """``unpacked(packed)``: name to the values of each column."""
    return _unpacked


def _unpacked(packed):
    """What the page's script does, value by value."""
    raw = zlib.decompress(base64.b64decode(packed.packed_text()), -zlib.MAX_WBITS)
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
