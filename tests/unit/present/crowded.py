"""A run made by hand for the golden files of ``step`` and ``request``: everything that they can show."""

from pathlib import Path

from schedtrace.model.causes import Cap, Cause
from schedtrace.model.trace import ChunkCap, Exit, Preemption, ScheduledRequest
from tests.makers import arrival, finish, manifest, run_folder, step

MS = 1000
DECODING = [f"t1-{n}" for n in range(30)]
LATE = [f"t1-{n}" for n in range(30, 44)]
SOURCE = "vllm/v1/core/sched/scheduler.py"


def crowded(folder: Path) -> Path:
    """Thirty requests decode; in step 2 one is preempted, one comes back, one is cut, twelve wait."""
    victim, cut, large = "t1-29", "t1-30", "t1-31"
    came = [arrival(name, 0, 50, prompt_tokens=10, max_tokens=8) for name in DECODING]
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
        step(0, start=100, trial=1, back=9_900, arrived=came, prefill_tokens=300, requests=first_chunks()),
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
