"""The comparison of ``test_oracle.py`` sees one token less; an ordinary load shows nothing special."""

import pytest

pytest.importorskip("vllm")

from tests.contract.deciding import Deciding, decisions, first_difference
from tests.contract.loads import SEEDS
from tests.contract.shows import SHOWS

pytestmark = pytest.mark.vllm


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
