"""The traced scheduler decides as the plain one does, step by step."""

import pytest

pytest.importorskip("vllm")

from schedtrace.record.traced import traced_class
from tests.contract.deciding import Deciding, decisions, first_difference
from tests.contract.loads import FAMILIES, SEEDS

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_tracing_changes_no_decision(name, seed, recording, warnings):
    plain, traced = decisions(name, seed), decisions(name, seed, traced_class)
    assert first_difference(plain, traced) is None
    assert warnings == []
    assert next(recording.glob("engine-0.jsonl")).read_bytes().count(b'{"type":"step"') == sum(
        "tokens" in decision for decision in traced
    )


SHOWS = {
    "fcfs": lambda taken: len(taken["running"]) > 1,
    "priority": lambda taken: taken.get("preempted"),
    "tight_kv": lambda taken: taken.get("preempted"),
    "tight_kv_small_budget": lambda taken: taken.get("preempted"),
    "few_seqs": lambda taken: len(taken["running"]) == 3 and taken["waiting"],
    "chunked_prefill_off": lambda taken: (
        sum(n for _, n in taken.get("tokens", ())) < 256 and taken["waiting"]
    ),
    "long_prefill_cap": lambda taken: any(n == 24 for _, n in taken.get("tokens", ())),
    "prefix_caching": lambda taken: any(computed for _, computed, _ in taken.get("new", ())),
    "prefix_caching_tight": lambda taken: taken.get("preempted"),
    "aborts": lambda taken: taken.get("finished"),
    "async": lambda taken: taken.get("tokens"),
    "async_tight": lambda taken: taken.get("preempted"),
    "async_aborts": lambda taken: taken.get("preempted"),
    "watermark": lambda taken: taken["usage"] <= 0.8 and taken["waiting"],
    "paused": lambda taken: taken["waiting"] and not taken.get("tokens", True),
    "resets": lambda taken: taken.get("preempted"),
    "async_resets": lambda taken: taken.get("preempted"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_load_shows_what_it_is_named_after(name):
    assert [seed for seed in SEEDS if any(map(SHOWS[name], decisions(name, seed)))] == SEEDS


def test_one_token_less_in_one_step_is_noticed():
    def one_token_less(plain):
        class OneTokenLess(plain):
            def schedule(self, *args):
                self.max_num_scheduled_tokens -= self.current_step == 5
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
