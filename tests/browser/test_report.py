"""What a person does with the page of a run, in a real browser."""

import json
from pathlib import Path

import polars as pl
import pytest

from schedtrace.cli.main import main
from schedtrace.explain.step import explain_step
from schedtrace.model.causes import Cause
from schedtrace.model.message import plain
from schedtrace.model.printable import visible
from schedtrace.model.trace import Exit, Preemption
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, finish, run_folder, step

RECORDED = Path(__file__).parent.parent / "data" / "findings"
FINDINGS = ("kv-bound", "preemption", "priority-inversion", "rank-imbalance", "spec-decode")
HOSTILE = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "</script><script>document.title='owned'</script>",
    "\u202eright to left\u2028'`${1}",
    "x" * 10_000,
)


@pytest.fixture(scope="session")
def kv_bound(page_of):
    return page_of(RECORDED / "kv-bound" / "shows")


@pytest.fixture(scope="session")
def by_hand(tmp_path_factory, page_of):
    """Four steps 10 ms apart: b waits for KV blocks in step 1, is preempted in step 3."""
    refused = Exit("waiting", "break", Cause.KV_BLOCKS, "b", 900)
    run = run_folder(
        tmp_path_factory.mktemp("hand") / "run",
        step(
            0,
            got={"a": 100},
            new="a",
            arrived=[arrival("a", 0, 0)],
            prefill_tokens=100,
            kv_blocks_free_after=90,
        ),
        step(
            1, got={"a": 1}, waiting=1, ended=refused, arrived=[arrival("b", 9_000, 9_500)], decode_tokens=1
        ),
        step(2, got={"a": 1, "b": 50}, new="b", decode_tokens=1, prefill_tokens=50),
        step(
            3,
            got={"a": 1},
            waiting=1,
            ended=Cause.PREEMPTED_THIS_STEP,
            preempted=[Preemption("b", 50, "a", 1)],
            decode_tokens=1,
        ),
        step(4, got={"a": 1}, decode_tokens=1, finished=[finish(name, finished_us=41_000) for name in "ab"]),
    )
    return page_of(run)


def place_of(opened):
    """Where the first engine's token budget is drawn, in pixels of the window."""
    return opened.js("""(() => {
        const e = schedtrace.engines[0], at = e.canvas.getBoundingClientRect();
        return {x: at.left + e.box.left, y: at.top + e.box.panels.budget.y + 20, width: e.box.width};
    })()""")


@pytest.mark.parametrize("finding", FINDINGS)
def test_pages_of_recorded_runs_say_and_count_what_analyze_does(finding, capsys, page_of, look):
    run = RECORDED / finding / "shows"
    opened = look(page_of(run))
    capsys.readouterr()
    assert main(["analyze", str(run), "--format", "json"]) == 0
    [report] = json.loads(capsys.readouterr().out)["runs"]
    assert opened.page.inner_text("#verdict") == " ".join(sentence["text"] for sentence in report["verdict"])
    trials = report["trials"]
    sums = opened.js(
        "schedtrace.engines.map(e => "
        "({rank: e.rank, requests: e.request_count, ...schedtrace.sumsOf(e, e.begin[0], e.end.at(-1))}))"
    )
    for engine in sums:
        own = [trial for trial in trials if trial["engine_rank"] == engine["rank"]]
        assert engine["steps"] == sum(trial["steps"] for trial in own)
        assert engine["preemptions"] == sum(trial["preemptions"] for trial in own)
        if len(own) == 1:
            assert engine["use"] == pytest.approx(own[0]["budget_use_frac"])
    titles = [one["title"]["text"] for one in report["findings"] if one["title"]["text"] and one["steps"]]
    assert opened.page.locator("#findings button").all_inner_texts() == titles


def test_rows_of_the_picture_are_the_steps(by_hand, look):
    e = "schedtrace.engines[0]"
    opened = look(by_hand)
    read = {
        name: opened.js(f"[...{e}.{name}]")
        for name in ("step", "begin", "end", "decode", "prefill", "waiting", "kv_used", "preempted")
    }
    assert read == {
        "step": [0, 1, 2, 3, 4],
        "begin": [0, 10_000, 20_000, 30_000, 40_000],
        "end": [1000, 11_000, 21_000, 31_000, 41_000],
        "decode": [0, 1, 1, 1, 1],
        "prefill": [100, 0, 50, 0, 0],
        "waiting": [0, 1, 0, 1, 0],
        "kv_used": [10, 0, 0, 0, 0],
        "preempted": [0, 0, 0, 1, 0],
    }
    assert opened.js(f"{e}.lives.map(life => life.id)") == ["a", "b"]
    sums = opened.js(f"schedtrace.sumsOf({e}, 0, 41_000)")
    assert sums["waiting"] == [["kv_blocks", 10_000], ["preempted_this_step", 10_000]]


def test_colours_of_the_picture_are_those_of_causes_and_work(by_hand, look):
    opened = look(by_hand, "#t=0.010000-0.020000")
    colours = """places => {
        const e = schedtrace.engines[0], copy = new OffscreenCanvas(e.canvas.width, e.canvas.height);
        const context = copy.getContext("2d", {willReadFrequently: true});
        context.drawImage(e.canvas, 0, 0);
        return places.map(([panel, share]) => {
            const one = e.box.panels[panel], y = Math.floor(one.y + share * one.height);
            return [...context.getImageData(Math.round(e.box.x(14_300)), y, 1, 1).data].slice(0, 3);
        });
    }"""
    kv, decode = [201, 32, 4], [7, 71, 162]
    places = {"ribbon": 0.5, "queue": 0.72, "requests": 1.5 * 16 / 300}  # b is in the second row
    assert opened.page.evaluate(colours, list(places.items())) == [kv, decode, kv]


def test_a_click_on_a_step_shows_it_and_back_undoes_it(by_hand, look):
    opened = look(by_hand)
    box = place_of(opened)
    where = (box["x"] + 35 / 41 * box["width"], box["y"])
    opened.page.mouse.click(*where)
    assert opened.page.inner_text("#details h2") == "Step 3 of run"
    assert "vLLM preempted b for a" in opened.page.inner_text("#details")
    assert opened.js("location.hash") == "#step=3&rank=0"
    opened.page.keyboard.press("[")
    assert opened.page.inner_text("#details h2") == "Step 2"
    opened.page.go_back()
    opened.painted()
    assert opened.js("location.hash") == ""
    assert opened.page.locator("#details h2").count() == 0


def test_zoom_with_the_mouse_the_wheel_the_keys_and_the_map(kv_bound, look):
    opened = look(kv_bound)
    span = "schedtrace.view.end - schedtrace.view.begin"
    whole = opened.js(span)
    box = place_of(opened)
    mouse = opened.page.mouse
    mouse.move(box["x"] + 0.25 * box["width"], box["y"])
    mouse.down()
    mouse.move(box["x"] + 0.5 * box["width"], box["y"], steps=3)
    mouse.up()
    assert opened.js(span) == pytest.approx(whole / 4, rel=0.02)
    opened.page.keyboard.press("+")
    assert opened.js(span) == pytest.approx(whole / 8, rel=0.02)
    opened.page.keyboard.press("0")
    assert opened.js(span) == pytest.approx(whole)
    opened.page.hover("#map")
    mouse.wheel(0, -100)
    opened.painted()
    assert opened.js(span) == pytest.approx(whole * 2.718281828**-0.5, rel=0.02)
    opened.page.click("[data-do=in]")
    opened.page.click("[data-do=all]")
    assert opened.js(span) == pytest.approx(whole)


def test_hours_without_a_step_do_not_keep_from_zooming_to_one(tmp_path, page_of, look):
    hours = 3_600_000_000
    steps = [step(number, start=number * 10_000 + number // 20 * hours, got={"a": 1}) for number in range(60)]
    opened = look(page_of(run_folder(tmp_path / "run", *steps)))
    opened.js("schedtrace.zoomTo(200_000, 200_001)")
    assert opened.js("schedtrace.view.end - schedtrace.view.begin") == pytest.approx(5_000)


def test_a_finding_shows_its_steps(kv_bound, look):
    opened = look(kv_bound)
    opened.page.focus("#findings button")
    opened.page.keyboard.press("Enter")
    opened.painted()
    assert opened.page.get_attribute("#findings button", "aria-pressed") == "true"
    assert "steps show it" in opened.page.inner_text("#details")
    opened.page.click("#details a")
    opened.painted()
    assert opened.js("location.hash").startswith("#step=")
    assert opened.page.inner_text("#details h2").startswith("Step ")


def test_a_deep_link_shows_the_picture_on_a_phone(by_hand, look):
    opened = look(by_hand, "#step=1&rank=0", viewport={"width": 390, "height": 844})
    assert abs(opened.js("document.querySelector('#tools').getBoundingClientRect().top")) < 2


def test_deep_links(by_hand, look):
    opened = look(by_hand, "#step=1&rank=0")
    assert opened.page.inner_text("#details h2") == "Step 1 of run"
    assert "the KV cache had no room for the next request" in opened.page.inner_text("#details")
    opened = look(by_hand, "#request=b")
    assert opened.page.inner_text("#details h2") == "Request b of run"
    opened = look(by_hand, "#t=0.010-0.020")
    assert opened.js("[schedtrace.view.begin, schedtrace.view.end]") == [10_000, 20_000]
    assert "not in the picture" in look(by_hand, "#step=99&rank=0").page.inner_text("#details")


def test_dark_and_light(by_hand, look):
    background = "getComputedStyle(document.body).backgroundColor"
    opened = look(by_hand, color_scheme="dark")
    assert opened.js(background) == "rgb(20, 23, 26)"
    opened.page.click("#theme")
    assert opened.js(background) == "rgb(255, 255, 255)"
    opened = look(by_hand, color_scheme="light")
    opened.page.click("#theme")
    opened.page.click("#theme")
    assert opened.js(background) == "rgb(20, 23, 26)"


def test_a_narrow_screen_has_nothing_beside_it(kv_bound, look):
    opened = look(kv_bound, viewport={"width": 390, "height": 800}, has_touch=True)
    assert opened.js("document.documentElement.scrollWidth") == 390
    assert opened.js("schedtrace.engines[0].box.left") == 0


def test_two_fingers_zoom_and_one_moves(kv_bound, look):
    opened = look(kv_bound, viewport={"width": 390, "height": 1600}, has_touch=True)
    box = place_of(opened)
    session = opened.page.context.new_cdp_session(opened.page)

    def touch(kind, *xs):
        points = [{"x": box["x"] + x, "y": box["y"], "id": at} for at, x in enumerate(xs)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    before = opened.js("[schedtrace.view.begin, schedtrace.view.end]")
    touch("touchStart", 150, 200)
    touch("touchMove", 125, 225)
    touch("touchEnd")
    opened.painted()
    begin, end = opened.js("[schedtrace.view.begin, schedtrace.view.end]")
    assert end - begin == pytest.approx((before[1] - before[0]) / 2, rel=0.05)
    touch("touchStart", 200)
    for x in (190, 170, 150):
        touch("touchMove", x)
    touch("touchEnd")
    opened.painted()
    moved = opened.js("schedtrace.view.begin") - begin
    assert moved == pytest.approx(50 / box["width"] * (end - begin), rel=0.3)


def test_strangers_texts_stay_text(tmp_path, look):
    lines = [
        step(
            0,
            got=dict.fromkeys(HOSTILE, 5),
            new=HOSTILE,
            prefill_tokens=25,
            arrived=[arrival(name, 0, 0) for name in HOSTILE],
        ),
        step(
            1,
            got=dict.fromkeys(HOSTILE, 1),
            decode_tokens=5,
            finished=[finish(name, finished_us=11_000) for name in HOSTILE],
        ),
    ]
    run = run_folder(tmp_path / "<b>run", *lines, model="</title><script>document.title='owned'</script>")
    assert main(["report", str(run)]) == 0
    opened = look(run / "report.html")
    ids = opened.js("schedtrace.engines[0].ids")
    assert set(ids) == {visible(name) for name in HOSTILE}
    for name in ids:
        opened.page.evaluate("id => { location.hash = `#request=${encodeURIComponent(id)}` }", name)
        opened.page.wait_for_function(
            "id => document.querySelector('#details h2')?.textContent === `Request ${id}`", arg=name
        )
    assert opened.page.title() == "<b>run - schedtrace"
    assert opened.js("document.images.length") == 0


def test_two_runs_lie_on_one_axis_with_their_first_difference(page_of, look):
    folder = RECORDED / "kv-bound"
    opened = look(page_of(folder / "shows", folder / "near-miss"))
    assert opened.js("schedtrace.engines.map(e => [e.run, e.lives[0].begin])") == [[0, 0], [1, 0]]
    assert opened.page.inner_text("#verdict").startswith("Verdict: ")
    assert opened.page.locator(".engine h2").count() == 2


def test_a_request_that_no_finding_names_has_its_states(kv_bound, look):
    opened = look(kv_bound)
    name = opened.js("schedtrace.engines[0].ids.find(id => !schedtrace.stories.at.includes(`request=${id}`))")
    opened.page.evaluate("id => { location.hash = `#request=${id}` }", name)
    opened.page.wait_for_selector("#details h2")
    timeline = make_timeline(read_run(RECORDED / "kv-bound" / "shows").traces[0])
    states = timeline.request_states.filter(pl.col("request_id") == name)
    shown = opened.js("[...document.querySelectorAll('#details tr')].map(row => row.cells[1].innerText)")
    words = [state.replace("_", " ") for state in states["state"].rle().struct.field("value")]
    assert list(dict.fromkeys(word.partition(" (")[0] for word in shown)) == list(dict.fromkeys(words))


def test_any_step_reads_as_in_schedtrace_step(kv_bound, look):
    run = read_run(RECORDED / "kv-bound" / "shows")
    opened = look(kv_bound)
    told = opened.js("schedtrace.stories.at")
    steps = [int(step) for step in opened.js("[...schedtrace.engines[0].step]")]
    others = [step for step in steps if f"step={step}&rank=0" not in told]
    for number in others[:: len(others) // 8]:
        opened.js(f"location.hash = '#step={number}&rank=0'")
        opened.page.wait_for_function(
            "start => `${document.querySelector('#details h2')?.textContent} `.startsWith(start)",
            arg=f"Step {number} ",
        )
        story = explain_step(run, number)
        said = opened.js("[...document.querySelectorAll('#details td p')].map(p => p.textContent)")
        assert said == [plain(one.message) for one in (*story.preempted, *story.stops)]


def test_a_log_without_times_has_no_picture_but_says_so(page_of, look):
    log = RECORDED.parents[1] / "unit" / "read" / "data" / "iteration-details.log"
    opened = look(page_of(log))
    assert not opened.page.is_visible("#timeline")
    opened.page.keyboard.press("]")
    assert "is not drawn: the record has no times of its steps." in opened.page.inner_text(".hint >> nth=-1")
