"""Runs made by hand for the golden files: everything that commands can show, in few steps."""

from pathlib import Path
from typing import Any

from schedtrace.model.causes import Cap, Cause
from schedtrace.model.trace import AnyLine, ChunkCap, Events, Exit, Preemption, ScheduledRequest
from tests.makers import arrival, finish, manifest, result, run_folder, step, workload

MS = 1000


def ran(name: str, came: int, first: int, last: int):
    """A request that came at ``came`` and had its first and last of 10 tokens at these times."""
    return finish(name, arrived_us=came, first_token_us=first, last_token_us=last, finished_us=last)


def trial(number: int, first: int, *, blocked: bool) -> list[AnyLine]:
    """Four steps from step ``first`` on, for four requests, two of which come late."""
    at = 100 * MS * number
    a, b, c, d = (f"t{number}-{n}" for n in range(4))
    arrivals = [arrival(name, at - 100, at - 50) for name in (a, b)]
    late = [arrival(name, at + 5 * MS, at + 6 * MS, prompt_tokens=200) for name in (c, d)]
    refused = Exit("waiting", "break", Cause.KV_BLOCKS, d, 798, via="source", location="scheduler.py:1001")
    held = {"waiting": 1, "waiting_tokens_after": 200, "ended": refused, "kv_blocks_free_after": 3}

    def one(place: int, start_ms: int, back_ms: int, got: dict[str, int], **fields: Any) -> AnyLine:
        start, back = at + start_ms * MS, back_ms * MS
        return step(first + place, trial=number, start=start, back=back, got=got, **fields)

    done = [ran(name, at - 100, at + 10 * MS, at + 28 * MS) for name in (a, b)]
    begin = one(
        0, 0, 10, {a: 100, b: 100}, new=[a, b], arrived=arrivals, kv_blocks_free_after=80, prefill_tokens=200
    )
    if blocked:
        lost = [Preemption(c, 200, d, 1)]
        again = {"resumed": [c], "prefill_tokens": 200, "recomputed_tokens": 200}
        others = [
            one(1, 11, 12, {a: 1, b: 1, c: 200}, new=[c], arrived=late, prefill_tokens=200, **held),
            one(2, 24, 4, {a: 1, b: 1, d: 200}, new=[d], preempted=lost, prefill_tokens=200),
            one(3, 29, 11, {c: 201}, finished=done, **again),
        ]
    else:
        others = [
            one(1, 11, 12, {a: 1, b: 1, c: 200, d: 200}, new=[c, d], arrived=late, prefill_tokens=200),
            one(2, 24, 4, {a: 1, b: 1, c: 1, d: 1}),
            one(3, 29, 11, {c: 1, d: 1}, finished=done),
        ]
    return [
        begin,
        *others,
        Events(
            at_us=at + 50 * MS,
            finished=[ran(name, at + 5 * MS, at + 23 * MS, at + 40 * MS) for name in (c, d)],
        ),
    ]


def warm_up() -> list[AnyLine]:
    come = [arrival("t0-0", 0, 0)]
    return [
        step(0, trial=0, got={"t0-0": 100}, new=["t0-0"], arrived=come),
        step(1, trial=0, got={"t0-0": 1}),
    ]


def about(label: str, **engine: int):
    blocks = {"num_gpu_blocks_override": None, **engine}
    return manifest(
        label=label,
        engine_args_given=engine,
        config_resolved={"scheduler_config": {"max_num_seqs": 8}, "cache_config": blocks},
        workload=workload(warmup_requests=1),
        trials=[result(1, 0.050), result(2, 0.040 if engine else 0.048)],
    )


def small_kv(folder: Path) -> Path:
    """Two trials of requests that come late, are refused and preempted; then it was interrupted."""
    lines = [*warm_up(), *trial(1, 2, blocked=True), *trial(2, 6, blocked=True)]
    told = about("small-kv", num_gpu_blocks_override=40)
    told.status = "interrupted"
    return run_folder(folder, *lines, about=told, trial_ids=True, exits_via="source")


def enough(folder: Path) -> Path:
    """The same requests where nobody is refused."""
    lines = [*warm_up(), *trial(1, 2, blocked=False), *trial(2, 6, blocked=False)]
    return run_folder(folder, *lines, about=about("enough"), trial_ids=True, kv_blocks_total=200)


def two_bare_engines(folder: Path) -> Path:
    """Attached to a server: no manifest, no trials, nothing to find, and a notice of the recorder."""
    for rank in (0, 1):
        got = {"a": 400, "b": 300}
        lines = [step(0, got=got, new="ab"), step(1, got={"a": 1, "b": 1}), step(2)]
        unseen = {"preemptions_recorded": False, "notices": ["no hook for preemptions"]}
        run_folder(folder, *lines, engine_rank=rank, **unseen)
    return folder


DECODING = [f"t1-{n}" for n in range(30)]
LATE = [f"t1-{n}" for n in range(30, 44)]
SOURCE = "vllm/v1/core/sched/scheduler.py"


def crowded(folder: Path) -> Path:
    """Thirty requests decode; in step 2 one is preempted, one comes back, one is cut, twelve wait."""
    victim, cut, large = "t1-29", "t1-30", "t1-31"
    arrivals = [arrival(name, 0, 50, prompt_tokens=10, max_tokens=8) for name in DECODING]
    late = [arrival(name, 8 * MS, 9 * MS, prompt_tokens=500 + n, max_tokens=4) for n, name in enumerate(LATE)]
    place = {"via": "source"}
    refused = Exit(
        "waiting", "break", Cause.KV_BLOCKS, large, 330, "full_sequence", location=f"{SOURCE}:1001", **place
    )
    refused.blocks_needed, refused.blocks_free = 51, 40
    skipped = Exit(
        "running", "continue", Cause.OUTPUT_IN_FLIGHT, "t1-0", 371, location=f"{SOURCE}:500", **place
    )
    gate = Exit("waiting", "gate", Cause.PREEMPTED_THIS_STEP, None, 971, location=f"{SOURCE}:600", **place)
    about_victim = {
        "arrived_us": 0,
        "first_token_us": 10 * MS,
        "last_token_us": 60 * MS,
        "finished_us": 60_020,
    }
    lines = [
        step(
            0, start=100, trial=1, back=9_900, arrived=arrivals, prefill_tokens=300, requests=first_chunks()
        ),
        step(
            1,
            start=11 * MS,
            trial=1,
            back=8 * MS,
            arrived=late,
            preempted=[Preemption(victim, 10, "t1-3", 1, blocks_needed=1, blocks_freed=1)],
            requests=[ScheduledRequest(name, 10, 1) for name in DECODING[:-1]],
            total_requests=29,
            remaining_budget=971,
            ended=gate,
            waiting=15,
        ),
        step(
            2,
            start=20 * MS,
            trial=1,
            back=30 * MS,
            took=1_234,
            requests=[
                *(ScheduledRequest(name, 11, 1) for name in DECODING[1:-1]),
                ScheduledRequest(victim, 0, 11, "resumed"),
                ScheduledRequest(cut, 0, 300, "new"),
            ],
            caps=[ChunkCap(cut, Cap.LONG_PREFILL, 500, 300)],
            total_requests=30,
            remaining_budget=661,
            exits=[skipped, refused],
            num_running_before=29,
            num_running_after=31,
            num_waiting_before=15,
            num_waiting_after=13,
            kv_blocks_total=400,
            kv_blocks_free_before=70,
            kv_blocks_free_after=40,
            output_tokens=29,
        ),
        step(
            3,
            start=51 * MS,
            trial=1,
            back=9 * MS,
            requests=[ScheduledRequest(victim, 11, 1)],
            total_requests=1,
            arrived=[arrival("t1-44", 21 * MS, 50 * MS), arrival("t1-45", 49 * MS, 50 * MS)],
            waiting=15,
            ended=Cause.TOKEN_BUDGET,
        ),
        step(
            4, start=70 * MS, trial=1, waiting=16, finished=[finish(victim, prompt_tokens=10, **about_victim)]
        ),
    ]
    config = {"long_prefill_token_threshold": 300, "scheduler_reserve_full_isl": True}
    told = manifest(label="crowded")
    return run_folder(folder, *lines, about=told, trial_ids=True, exits_via="source", scheduler_config=config)


def first_chunks() -> list[ScheduledRequest]:
    return [ScheduledRequest(name, 0, 10, "new") for name in DECODING]
