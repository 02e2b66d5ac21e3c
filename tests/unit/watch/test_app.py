"""The screen, at the sizes of a small and a large terminal."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from schedtrace.model.trace import End
from schedtrace.read.run import read_run
from schedtrace.watch import view
from schedtrace.watch.app import WatchApp
from schedtrace.watch.plain_lines import status_page
from tests.unit.present.test_goldens import check
from tests.unit.watch.growing import Growing, session_of


def screen_of(app):
    strips = app.screen._compositor.render_strips(app.size)
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


def shown(session, *actions, size=(80, 24)):
    """The screen after each of these: keys to press, or functions to call before a look."""

    async def show():
        app = WatchApp(session, every_s=None, folder=session.target.path.parent)
        screens = []
        async with app.run_test(size=size) as pilot:
            await app.refresh_seen()
            await pilot.pause()
            screens.append(screen_of(app))
            for action in actions:
                if isinstance(action, str):
                    await pilot.press(action)
                else:
                    action()
                    await app.refresh_seen()
                await app.workers.wait_for_complete()
                await pilot.pause()
                screens.append(screen_of(app))
        return screens

    return asyncio.run(show())


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize("size", [(80, 24), (200, 50)], ids=str)
def test_the_whole_screen(growing, session, size):
    """UPDATE_GOLDENS=1 writes it again (then read it)."""
    growing.grow(100)
    ((*lines, keys),) = shown(session, size=size)
    check(f"watch-{size[0]}x{size[1]}", "".join(f"{line}\n" for line in lines))
    assert len(lines) == size[1] - 1
    assert keys.startswith(" q Quit  space Pause")


def test_advice_is_cut_only_where_there_is_no_room_for_it(growing, session):
    growing.grow(100)
    ((*screen, _),) = shown(session)
    advice = status_page(session.observe_engines()).splitlines()[1].partition("Try: ")[2]
    told = " ".join(" ".join(screen).split())
    assert told.count(f"Try: {advice}") == 2
    ((*screen, _),) = shown(session, size=(80, 16))
    assert all(line.endswith(" ...") for line in screen[1:3])  # one line each
    assert screen[3].startswith("          running")


def test_ranks_can_be_chosen(folder):
    one, two = Growing(folder, 0, waiting=("c",)), Growing(folder, 1, waiting=("d",))
    one.grow(50)
    two.grow(50)
    whole, _, first, second = shown(session_of(folder, one, judged=False), "shift+tab", "down", "down")
    assert [line.split()[:2] for line in whole if line.startswith(("all", "rank"))] == [
        ["all", "4/4"],
        ["rank", "0"],
        ["rank", "1"],
    ]
    assert any("rank 1  d  waiting" in line for line in whole)
    assert any(line.startswith("Waiting requests, rank 0, last 146 s") for line in first)
    assert any(line.startswith("Waiting requests, rank 1, last 146 s") for line in second)
    assert any(" d  waiting" in line for line in second)
    assert not any(" c  waiting" in line for line in second)


def test_one_engine_leaves_the_focus_to_the_requests(growing, unjudged):
    growing.grow(30)
    *_, life, _ = shown(unjudged, "tab", "shift+tab", "down", "enter", "escape")
    assert life[0].startswith(" Request a ")


def test_keys_reach_the_requests_when_nothing_has_the_focus(growing, unjudged):
    growing.grow(30)

    async def without_focus():
        app = WatchApp(unjudged, every_s=None, folder=unjudged.target.path.parent)
        async with app.run_test(size=(80, 24)) as pilot:
            await app.refresh_seen()
            assert app.focused.id == "requests"
            app.screen.set_focus(None)
            await pilot.press("down", "enter")
            await pilot.pause()
            return screen_of(app)

    assert asyncio.run(without_focus())[0].startswith(" Request a ")


def test_what_is_waited_for_is_on_the_screen(folder, growing, unjudged):
    growing.path.unlink()
    folder.rmdir()
    (screen,) = shown(unjudged, size=(200, 50))
    assert screen[1] == f"waiting for {folder} to appear: no such file or folder yet"


def test_an_old_verdict_is_dim(growing, session):
    growing.grow(30)
    seen = session.observe_engines()

    def dim(at_s):
        return any(span.style == "dim" for span in view.verdicts(replace(seen, at_s=at_s), 80, 3).spans)

    assert not dim(seen.at_s + 10)
    assert dim(seen.at_s + 11)


def test_a_request_can_be_looked_at_while_the_list_moves(growing, unjudged):
    growing.grow(30)
    _, _, moved, life, back = shown(unjudged, "down", lambda: growing.grow(30), "enter", "escape")
    assert any("   6.0 s  a  running" in line for line in moved)
    assert life[0].startswith(" Request a ")
    assert any("scheduled" in line or "prefill" in line for line in life)
    assert back[0].startswith("run ")


def test_pause_stops_and_goes_on(growing, unjudged):
    growing.grow(30)
    first, paused, still, again = shown(unjudged, "space", lambda: growing.grow(30), "space")
    assert "  paused  " in paused[0]
    assert still == paused
    assert "  live  " in first[0]
    assert "  live  " in again[0]


def test_what_is_seen_can_be_saved_as_text_and_as_a_trace(folder, growing, session):
    growing.grow(30)
    shown(session, "s", "w")
    (text,) = folder.parent.glob("watch-*.txt")
    assert text.read_text().startswith("run, 2023-11-1")
    (saved,) = [path for path in folder.parent.glob("watch-*") if path.is_dir()]
    assert read_run(saved).traces[0].steps.height == 30


def test_help_and_the_whole_text_can_be_read(growing, session):
    growing.grow(30)
    _, keys, _, text, _ = shown(session, "question_mark", "escape", "v", "escape")
    assert any("save the last minute as a run folder" in line for line in keys)
    assert any("Of the 2 seats" in line for line in text)


def test_what_happens_to_the_trace_is_one_line_and_no_traceback(growing, session):
    growing.grow(30)
    end = partial(growing.append, End(at_us=3_000_000, steps=30))
    _, ended, removed = shown(session, end, growing.path.unlink, size=(200, 50))
    assert any(line.endswith("the engine ended") for line in ended)
    assert "  ended  " in ended[0]
    assert any(line.endswith("engine-0.jsonl: removed while it was followed") for line in removed)
    assert "  waiting for a trace  " in removed[0]


def test_hostile_ids_stay_text(folder):
    hostile = "\x1b]0;x\x07[bold]<script>\u202e" + "x" * 9000
    growing = Growing(folder, waiting=(hostile,))
    growing.grow(30)
    listed, life, _ = shown(session_of(folder, growing), "enter", "escape")
    assert any(r"\x1b]0;x\x" in line and "waiting 3.0 s, now for max_num_seqs" in line for line in listed)
    assert all(len(line) <= 80 for line in listed)
    assert any(r"\x1b]0;x\x07[bold]<script>\u202exxx" in line for line in life)
