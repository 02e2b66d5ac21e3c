from schedtrace.model.report import EffectiveSetting
from schedtrace.model.say import say
from schedtrace.present.pages.run_header import noteworthy, settings_table
from schedtrace.present.phrases import plain
from schedtrace.present.renderers.text import render
from schedtrace.present.sections import Page

SETTINGS = [
    EffectiveSetting(name="max_num_batched_tokens", value=16384, origin="given"),
    EffectiveSetting(
        name="async_scheduling",
        value=False,
        origin="overridden",
        given=True,
        explanation=say("True was given"),
    ),
    EffectiveSetting(name="watermark", value=1e-05, origin="given", inert=True, explanation=say("no effect")),
    EffectiveSetting(name="cudagraph_capture_sizes", value=[1, 2, 4, 8, 16, 512], origin="derived"),
]


def test_every_setting_is_a_row_with_value_origin_and_note():
    text = render(Page(SETTINGS, lambda shown: [settings_table(shown)]), width=100)
    assert [line.split() for line in text.splitlines() if line.strip()] == [
        ["setting", "value", "origin"],
        ["max_num_batched_tokens", "16,384", "given"],
        ["async_scheduling", "False", "overridden", "True", "was", "given"],
        ["watermark", "1e-05", "given,", "inert", "no", "effect"],
        ["cudagraph_capture_sizes", "1,", "2,", "4", "...", "512", "(6", "sizes)", "derived"],
    ]


def test_only_inert_and_overridden_settings_are_worth_a_line():
    assert plain(noteworthy(SETTINGS)) == (
        "async_scheduling False: True was given; watermark 1e-05: no effect."
    )
    assert not noteworthy([SETTINGS[0], SETTINGS[3]])
