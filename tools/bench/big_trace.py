"""A large trace, made up but like a real one: a server with all seats taken, prompts in chunks, preemptions.

The same bytes every time. 50,000 steps of 256 requests are about 1 GB in format 1, and a twentieth of it in
format 2, which tells the same load.
"""

import random
from collections import deque
from pathlib import Path
from typing import TextIO

import msgspec

from schedtrace.model.trace import Arrival, End, Exit, Finish, Preemption, ScheduledRequest, Step
from tests.deltas import Deltas
from tests.makers import header

BUDGET = 8192
BLOCK_SIZE = 16
STEP_US = 20_000
WARMUP_STEPS = 100
FULL_EVERY = 50
"""Steps: a full line a second."""


class Request:
    """One request: what it wants and how far it is."""

    def __init__(self, name: str, chance: random.Random, now_us: int) -> None:
        self.name = name
        self.start = f'{{"request_id":"{name}","computed_tokens":'
        self.prompt = chance.randint(100, 1500)
        self.outputs = chance.randint(50, 400)
        self.computed = self.done = self.preempted = 0
        self.wanted = self.prompt
        self.came = now_us
        self.scheduled: int | None = None
        self.first = 0


def write_big_trace(path: Path, steps: int = 50_000, seats: int = 256, version: int = 1) -> Path:
    """Write it to ``path``, in this version of the format."""
    settings = {"max_num_seqs": seats, "enable_chunked_prefill": True, "policy": "fcfs"}
    head = header(
        schema_version=version,
        token_budget=BUDGET,
        max_num_running_reqs=seats,
        block_size=BLOCK_SIZE,
        kv_blocks_total=seats * 80,
        trial_ids=True,
        scheduler_config=settings,
    )
    with path.open("w") as file:
        file.write(_text(head) + "\n")
        engine = _Engine(file, seats, Deltas(FULL_EVERY) if version > 1 else None)
        for number in range(steps):
            engine.step(number)
        file.write(_text(End(at_us=steps * STEP_US, steps=steps)) + "\n")
    return path


class _Engine:
    def __init__(self, file: TextIO, seats: int, deltas: Deltas | None) -> None:
        self.file, self.seats, self.deltas = file, seats, deltas
        self.chance = random.Random(7)  # noqa: S311  # no secret
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.count = 0
        self.finished: list[Finish] = []

    def step(self, number: int) -> None:
        now, trial = number * STEP_US, int(number >= WARMUP_STEPS)
        arrived = self._arrivals(now - 500, trial)
        before = len(self.running), len(self.waiting)
        preempted = self._preemptions(number)
        budget, rows, prefill, recomputed, decode, new, resumed = BUDGET, [], 0, 0, 0, 0, 0
        admitted: dict[Request, str] = {}
        for request in [*self.running, *self._admitted(admitted, self.seats - len(self.running))]:
            tokens = min(request.wanted - request.computed, budget)
            if not tokens:
                if request in admitted:  # back to the head of the queue
                    self.waiting.appendleft(request)
                    break
                continue
            phase = admitted.get(request)
            rows.append((request, request.computed, tokens, phase))
            if phase:
                self.running.append(request)
                request.scheduled = now if request.scheduled is None else request.scheduled
                new, resumed = new + (phase == "new"), resumed + (phase == "resumed")
            in_prompt = min(tokens, max(0, request.prompt - request.computed))
            if request.preempted and request.computed + tokens < request.wanted:
                recomputed += tokens
            prefill, decode = prefill + in_prompt, decode + tokens - in_prompt
            budget -= tokens
            request.computed += tokens
        back = now + 1000 + 4 * (BUDGET - budget) // 3 + self.chance.randint(0, 800)
        sampled = self._outputs(back)
        used = sum(-(-one.computed // BLOCK_SIZE) for one in self.running)
        cause = "token_budget" if not budget else "max_num_seqs" if self.waiting else "queue_empty"
        line = Step(
            step=number,
            trial=trial,
            start_us=now,
            schedule_us=self.chance.randint(300, 900),
            output_us=back,
            update_us=300,
            token_budget=BUDGET,
            remaining_budget=budget,
            total_requests=len(rows),
            max_num_running_reqs=self.seats,
            num_running_before=before[0],
            num_running_after=len(self.running),
            num_waiting_before=before[1],
            num_waiting_after=len(self.waiting),
            waiting_tokens_after=sum(one.wanted for one in self.waiting),
            kv_blocks_total=self.seats * 80,
            kv_blocks_free_after=self.seats * 80 - used,
            num_new=new,
            num_resumed=resumed,
            num_continued=len(rows) - new - resumed,
            prefill_tokens=prefill,
            decode_tokens=decode,
            recomputed_tokens=recomputed,
            output_tokens=sampled,
            exits=[
                Exit(
                    "waiting",
                    "break",
                    cause,
                    None,
                    budget,
                    location="v1/core/sched/scheduler.py:500",
                    via="source",
                )
            ],
            preempted=preempted,
            arrived=arrived,
            finished=self.finished,
        )
        self.finished = self._leave(back)
        self._write(line, rows)

    def _write(self, line: Step, rows: list[tuple[Request, int, int, str | None]]) -> None:
        if self.deltas is not None:
            line.requests = [
                ScheduledRequest(request.name, computed, tokens, phase or "running")
                for request, computed, tokens, phase in rows
            ]
            self.file.write(_text(self.deltas.line_of(line)) + "\n")
            return
        told = _text(line)
        if rows:
            texts = (
                f'{request.start}{computed},"scheduled_tokens":{tokens}'
                + (f',"phase":"{phase}"}}' if phase else "}")
                for request, computed, tokens, phase in rows
            )
            told = f'{told[:-1]},"requests":[{",".join(texts)}]}}'
        self.file.write(told + "\n")

    def _arrivals(self, now: int, trial: int) -> list[Arrival]:
        arrived = []
        while len(self.waiting) + len(arrived) < 8 and self.chance.random() < 0.8:
            request = Request(f"t{trial}-{self.count}-{self.chance.getrandbits(32):08x}", self.chance, now)
            self.count += 1
            arrived.append(
                Arrival(
                    request.name, now - 200, now, prompt_tokens=request.prompt, max_tokens=request.outputs
                )
            )
            self.waiting.append(request)
        return arrived

    def _admitted(self, admitted: dict[Request, str], seats: int):
        for _ in range(seats):
            if not self.waiting:
                return
            request = self.waiting.popleft()
            admitted[request] = "resumed" if request.preempted else "new"
            yield request

    def _preemptions(self, number: int) -> list[Preemption]:
        if number % 50 or len(self.running) < self.seats // 2:
            return []
        victim = self.running.pop()
        victim.preempted += 1
        lost, victim.computed = victim.computed, 0
        self.waiting.appendleft(victim)
        return [
            Preemption(
                victim.name, lost, self.running[0].name, victim.preempted, blocks_needed=1, policy="fcfs"
            )
        ]

    def _outputs(self, back: int) -> int:
        done = [one for one in self.running if one.computed == one.wanted]
        for request in done:
            request.first = request.first or back
            request.done += 1
            request.wanted += 1
        return len(done)

    def _leave(self, back: int) -> list[Finish]:
        gone = [one for one in self.running if one.done == one.outputs]
        if gone:
            self.running = [one for one in self.running if one.done < one.outputs]
        return [
            Finish(
                one.name,
                "LENGTH_CAPPED",
                back,
                one.prompt,
                one.done,
                one.preempted,
                one.came - 200,
                one.came,
                one.scheduled,
                one.first,
                back,
            )
            for one in gone
        ]


def _text(line: msgspec.Struct) -> str:
    return msgspec.json.encode(line).decode()
