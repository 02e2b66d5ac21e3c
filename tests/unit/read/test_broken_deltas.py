"""A trace of deltas cut, or with lines lost, garbled, doubled or swapped: no step is ever rebuilt wrongly."""

from random import Random

import msgspec
import pytest

from schedtrace.model.trace import End, ScheduledRequest
from schedtrace.read.chain import expanded_lines
from schedtrace.read.trace import read_trace
from tests.deltas import Deltas
from tests.makers import arrival, encoded, header, step

STEPS = 24


def schedule():
    """Steps in which requests come, prefill in chunks, decode, have drafts, are preempted and leave."""
    chance, computed, running, steps = Random(3), {}, [], []  # noqa: S311  # no secret
    for number in range(STEPS):
        phases, tokens = {}, {}
        if running and chance.random() < 0.3:
            running.remove(chance.choice(running))
        if len(running) < 4 and chance.random() < 0.7:
            name = chance.choice(["a", "b", "c", "d", "e", "f"])
            if name not in running:
                phases[name] = "resumed" if name in computed else "new"
                running.append(name)
                computed[name] = chance.choice([0, 4])
        told = []
        for name in running:
            tokens[name] = chance.choice([1, 1, 1, 1, 8])
            drafts = 3 if tokens[name] == 8 and name not in phases else 0
            told.append(
                ScheduledRequest(name, computed[name], tokens[name], phases.get(name, "running"), drafts)
            )
            computed[name] += tokens[name]
        used = sum(tokens.values())
        steps.append(
            step(
                number,
                requests=told,
                total_requests=len(told),
                remaining_budget=1000 - used,
                running=len(told),
                waiting=chance.choice([0, 2]),
                arrived=[arrival(name, number) for name in phases],
                ended=None,
            )
        )
    return steps


TRUE = schedule()
LINES = [
    encoded(header(schema_version=2)),
    *map(encoded, map(Deltas(full_every=7).line_of, TRUE)),
    encoded(End(at_us=9, steps=STEPS)),
]
IN_FULL = {one.step: encoded(one) for one in TRUE}


def test_the_trace_is_mostly_deltas():
    kinds = [msgspec.json.decode(line)["type"] for line in LINES]
    assert (kinds.count("delta"), kinds.count("step")) == (20, 4)


def rebuilt(tmp_path, content):
    """Step to its full line; fails if it is not the true one."""
    path = tmp_path / "engine-0.jsonl"
    path.write_bytes(content)
    found = {}
    for line in expanded_lines(path):
        if line.startswith(b'{"type":"step"'):
            number = msgspec.json.decode(line)["step"]
            assert line == IN_FULL[number]
            assert number not in found
            found[number] = line
    return found


def test_a_trace_cut_at_any_byte_has_the_steps_of_its_whole_lines(tmp_path):
    content = b"".join(line + b"\n" for line in LINES)
    ends = [at for at, byte in enumerate(content) if byte == 10]
    around = {end + by for end in ends[1:] for by in (-1, 0, 1, 2)} - {len(content), len(content) + 1}
    for size in sorted({*range(ends[0] + 1, ends[4]), *around}):
        whole = sum(at < size for at in ends) - 1
        assert list(rebuilt(tmp_path, content[:size])) == list(range(min(whole, STEPS)))


def counted(tmp_path, lines):
    """The numbers of the steps read, after a check that all others are counted."""
    found = rebuilt(tmp_path, b"".join(line + b"\n" for line in lines))
    trace = read_trace(tmp_path / "engine-0.jsonl")
    numbers = trace.steps["step"].to_list()
    assert numbers == sorted(found)
    assert trace.problems.doubtful == []
    lost = {n for first, last in trace.problems.not_rebuilt for n in range(first, last + 1)}
    assert not lost & set(numbers)
    assert len(numbers) + len(lost) + trace.problems.missing_steps == STEPS
    return numbers


def until_full(number):
    """The steps after this one up to the next full line."""
    return list(range(number, next((n for n in range(number + 1, STEPS) if n % 7 == 0), STEPS)))


@pytest.mark.parametrize("kept", [0, 30])
@pytest.mark.parametrize("number", range(STEPS))
def test_after_a_line_lost_or_garbled_all_up_to_the_next_full_one_are_counted(tmp_path, number, kept):
    left = [line if at != number + 1 else line[:kept] for at, line in enumerate(LINES)]
    assert counted(tmp_path, left) == sorted({*range(STEPS)} - {*until_full(number)})


@pytest.mark.parametrize("number", range(STEPS))
def test_after_a_line_told_twice_all_up_to_the_next_full_one_are_counted(tmp_path, number):
    doubled = [line for at, line in enumerate(LINES) for _ in range(1 + (at == number + 1))]
    assert counted(tmp_path, doubled) == sorted({*range(STEPS)} - {*until_full(number)[1:]})


@pytest.mark.parametrize("number", range(STEPS - 1))
def test_lines_in_another_order_are_never_rebuilt_wrongly(tmp_path, number):
    swapped = [*LINES]
    swapped[number + 1], swapped[number + 2] = swapped[number + 2], swapped[number + 1]
    assert set(counted(tmp_path, swapped)) >= {*range(STEPS)} - {*until_full(number), *until_full(number + 1)}


def test_a_trace_twice_in_one_file_counts_once(tmp_path):
    assert counted(tmp_path, [*LINES, *LINES]) == list(range(STEPS))


@pytest.mark.parametrize("seed", range(20))
def test_any_lines_lost_and_swapped_are_never_rebuilt_wrongly(tmp_path, seed):
    chance = Random(seed)  # noqa: S311  # no secret
    lines = [line for line in LINES[1:-1] if chance.random() < 0.9]
    for _ in range(chance.choice([0, 1, 3])):
        one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
        lines[one], lines[other] = lines[other], lines[one]
    assert len(counted(tmp_path, [LINES[0], *lines, LINES[-1]])) <= len(lines)
