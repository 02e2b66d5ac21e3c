"""Comparisons of runs whose timelines are mostly the same."""

import pytest


@pytest.fixture(autouse=True)
def _each_timeline_judged_once(each_timeline_judged_once):
    pass
