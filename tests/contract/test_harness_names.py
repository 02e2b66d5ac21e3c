"""Names that scripts outside the package build on: experiments on simulated engines and their reports."""

import inspect
from importlib import import_module

import pytest

NAMES = {
    "cli.analyze": ["_replay"],
    "diagnose.analyze": ["analyze"],
    "diagnose.rules": ["RULES"],
    "diagnose.waits": ["charged"],
    "present.pages.report": ["report_page"],
    "present.renderers": ["Format", "renderer"],
    "read.run": ["read_run"],
    "record.traced": ["traced_class"],
    "simulate": ["Simulation", "VirtualClock"],
    "simulate.executor": ["SimulatedExecutor"],
    "simulate.ranks": ["Ranks"],
    "step_times.batch": ["Batch"],
    "step_times.constants": ["Constants", "HostTimes"],
    "timeline.timeline": ["make_timeline"],
}


@pytest.mark.parametrize("module", NAMES)
def test_a_module_has_the_names_that_experiments_import(module):
    loaded = import_module(f"schedtrace.{module}")
    assert [name for name in NAMES[module] if not hasattr(loaded, name)] == []


def test_simulated_ranks_hand_outputs_to_a_method_that_experiments_override():
    from schedtrace.simulate.ranks import Ranks

    assert list(inspect.signature(Ranks.told).parameters) == ["self", "rank", "client", "outputs"]
