"""The colours of the timeline can be told apart, also with a colour vision deficiency."""

import math
from itertools import combinations

import pytest

from schedtrace.present.phrases import COLOURS

NAMES = (
    *("decode", "prefill", "recompute", "preempted"),
    *("kv_blocks", "max_num_seqs", "token_budget", "preempted_this_step", "other"),
)
VISION = {  # Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
LEAST = 13


def palettes():
    """Name to colour, for light and for dark."""
    return [{name: COLOURS[name][at] for name in NAMES} for at in (0, 1)]


def lab(colour, vision):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    r, g, b = (min(1, max(0, sum(w * x for w, x in zip(row, linear, strict=True)))) for row in VISION[vision])
    xyz = (
        (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047,
        0.2126729 * r + 0.7151522 * g + 0.0721750 * b,
        (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883,
    )
    x, y, z = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def ciede2000(one, other):
    """Sharma, Wu and Dalal (2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = ((math.hypot(a1, b1) + math.hypot(a2, b2)) / 2) ** 7
    stretch = 1.5 - 0.5 * math.sqrt(mean / (mean + 25**7))
    c1, c2 = math.hypot(stretch * a1, b1), math.hypot(stretch * a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, stretch * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0
    hue = h1 + h2 if not c1 * c2 else (h1 + turn / 2) % 360
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    t = (
        1
        - 0.17 * math.cos(math.radians(hue - 30))
        + 0.24 * math.cos(math.radians(2 * hue))
        + 0.32 * math.cos(math.radians(3 * hue + 6))
        - 0.2 * math.cos(math.radians(4 * hue - 63))
    )
    dl = (l2 - l1) / (1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2))
    dc = (c2 - c1) / (1 + 0.045 * chroma)
    dh = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2)) / (1 + 0.015 * chroma * t)
    bend = math.sin(math.radians(60 * math.exp(-(((hue - 275) / 25) ** 2))))
    rotation = -2 * math.sqrt(chroma**7 / (chroma**7 + 25**7)) * bend
    return math.sqrt(dl**2 + dc**2 + dh**2 + rotation * dc * dh)


def test_ciede2000_of_a_published_pair():
    assert ciede2000((50, 2.6772, -79.7751), (50, 0, -82.7485)) == pytest.approx(2.0425, abs=1e-4)
    assert ciede2000((50, 2.5, 0), (73, 25, -18)) == pytest.approx(27.1492, abs=1e-4)


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_every_two_colours_differ(palette, vision):
    seen = {name: lab(colour, vision) for name, colour in palette.items()}
    near = {(a, b): ciede2000(seen[a], seen[b]) for a, b in combinations(seen, 2)}
    assert {pair: round(difference, 1) for pair, difference in near.items() if difference < LEAST} == {}
