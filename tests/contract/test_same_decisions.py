"""The traced scheduler decides as the plain one does, step by step."""

from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from tests.contract.deciding import Deciding, Decision, decisions, first_difference
from tests.contract.loads import BUSY_STEPS, FAMILIES, SEEDS
from tests.contract.shows import SHOWS

pytestmark = pytest.mark.vllm


@dataclass
class Played:
    """A load on the plain scheduler and on the traced one."""

    name: str
    plain: list[Decision]
    traced: list[Decision]
    trace: Any


@pytest.fixture(params=[f"{name}-{seed}" for name in FAMILIES for seed in SEEDS], scope="module")
def played(request, tmp_path_factory):
    name, seed = request.param.rsplit("-", 1)
    folder = tmp_path_factory.mktemp("run")
    plain = decisions(name, int(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
        traced = decisions(name, int(seed), traced_class)
    return Played(name, plain, traced, read_run(folder).traces[0])


def test_tracing_changes_no_decision(played):
    assert first_difference(played.plain, played.traced) is None


def test_every_step_is_written_and_nothing_went_wrong(played):
    steps = sum("tokens" in decision for decision in played.traced)
    assert played.trace.steps.height == played.trace.end.steps == steps > BUSY_STEPS
    assert (played.trace.notices, played.trace.header.notices) == ([], [])


def test_the_load_shows_what_it_is_named_after(played):
    assert any(map(SHOWS[played.name], played.plain))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_ordinary_load_shows_nothing_of_the_kind(seed):
    plain = decisions("fcfs", seed)
    assert [name for name, shows in SHOWS.items() if any(map(shows, plain))] == ["fcfs"]


def test_one_token_less_in_one_step_is_noticed():
    def one_token_less(plain):
        class OneTokenLess(plain):
            calls = 0

            def schedule(self, *args):
                self.max_num_scheduled_tokens -= self.calls == 5
                self.calls += 1
                output = super().schedule(*args)
                self.max_num_scheduled_tokens = 256
                return output

        return OneTokenLess

    def of(wrap):
        engine = Deciding(wrap)
        for number in range(20):
            engine.add(f"r{number}", 100)
        engine.finish()
        return [taken for taken in engine.decisions if "tokens" in taken]

    same, less = of(None), of(one_token_less)
    assert first_difference(same, less) == 5
    assert sum(n for _, n in same[5]["tokens"]) == sum(n for _, n in less[5]["tokens"]) + 1
