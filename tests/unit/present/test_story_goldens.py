"""``step`` and ``request`` as a person reads them; UPDATE_GOLDENS=1 writes them again (then read them)."""

from pathlib import Path

import pytest

from schedtrace.explain.request import explain_request
from schedtrace.explain.step import explain_step
from schedtrace.model.trace import ScheduledRequest
from schedtrace.present.pages.story import request_page, step_page
from schedtrace.read.run import read_run
from tests.makers import arrival, run_folder, step
from tests.unit.present.hand_made import crowded
from tests.unit.present.test_goldens import check, text_of


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return read_run(crowded(Path("crowded")))


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("number", [1, 2])
def test_step(run, number, width):
    check(f"step-{number}-{width}", text_of(step_page(explain_step(run, number)), width))


@pytest.mark.parametrize("width", [80, 160])
def test_request(run, width):
    check(f"request-preempted-{width}", text_of(request_page(explain_request(run, "t1-29")), width))


def test_all_lists_every_request(run):
    story = explain_step(run, 2)
    some, every = (text_of(step_page(story, everything=everything)) for everything in (False, True))
    names = [row.request_id for row in story.scheduled] + [waiter.request_id for waiter in story.waiting]
    lines = every.splitlines()
    assert all(sum(f" {name} " in f"{line} " for line in lines) for name in names)
    assert "28 running requests decoded 1 token each" in some
    assert "decoded" not in every
    assert "--all" in some
    assert "--all" not in every


def test_a_servers_long_ids_leave_room_for_the_numbers(tmp_path):
    name = "chatcmpl-0123456789abcdef0123456789abcdef-0-89abcdef"
    arrivals = [arrival(f"{name}{n}", 0, 0, prompt_tokens=12_345) for n in range(2)]
    rows = [ScheduledRequest(f"{name}0", 0, 12_345, "new")]
    line = step(0, arrived=arrivals, requests=rows, waiting=1)
    page = step_page(explain_step(read_run(run_folder(tmp_path / "r", line)), 0))
    wide, narrow = (text_of(page, width).splitlines() for width in (160, 60))
    [row] = [line for line in wide if f"{name}0" in line and "prefill" in line]
    assert row.split() == [f"{name}0", "new", "prefill", "0", "12,345", "12,345"]
    at = [line.strip() for line in narrow].index(f"{name}0")
    assert narrow[at + 1 : at + 3] == [
        "    phase new; work prefill; computed before 0; tokens now",
        "    12,345; prompt 12,345",
    ]


def test_a_life_with_many_chunks_is_told_in_part(tmp_path):
    arrivals = [arrival("a", 0, 0, prompt_tokens=2000)]
    steps = [
        step(
            n,
            requests=[ScheduledRequest("a", 100 * n, 100, "running" if n else "new")],
            arrived=[] if n else arrivals,
        )
        for n in range(20)
    ]
    life = explain_request(read_run(run_folder(tmp_path / "r", *steps)), "a")
    text = text_of(request_page(life))
    assert sum("prefill of 100 tokens" in line for line in text.splitlines()) == 8
    assert "12 chunks left out: --format json lists them" in text
    assert "to 2,000 of 2,000" in text
    assert "P" * 20 in text
