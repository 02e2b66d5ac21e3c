"""``maxsize=1G,maxage=12h``."""

import pytest

from schedtrace.model.trace_bounds import EXPECTED, Bounds, bounds


@pytest.mark.parametrize(
    ("text", "found", "part"),
    [
        ("plain", None, None),
        ("maxsize=1G", Bounds(2**30), (2**26, 600)),
        ("maxsize=1.5M", Bounds(3 * 2**19), (3 * 2**15, 600)),
        ("maxage=1m", Bounds(max_s=60), (2**26, 3.75)),
        ("maxage=7d,maxsize=2T", Bounds(2**41, 7 * 86400), (2**26, 600)),
    ],
)
def test_what_is_kept(text, found, part):
    assert bounds(text) == found
    assert found is None or (found.part_bytes, found.part_s) == part


@pytest.mark.parametrize(
    "text",
    [
        *("", "zstd", "maxsize", "maxsize=", "maxsize=1", "maxsize=1023K", "maxsize=-1G", "maxage=59s"),
        *("maxage=1y", "maxsize=1G,", "maxsize=1G,maxsize=2G", "maxsize=1G maxage=1h", "plain,maxsize=1G"),
    ],
)
def test_what_is_not_understood(text):
    with pytest.raises(ValueError, match=EXPECTED.replace("(", r"\(").replace(")", r"\)")):
        bounds(text)
