"""Disaggregated prefill in virtual time: vLLM's real schedulers, and a connector that takes a made-up time.

Rank 0 prefills, the other ranks decode. A router sends each request to rank 0 and, with the parameters that
the connector returned, to a decode engine, as a proxy does. ``DelayedKV`` is the scheduler's side;
``TransferExecutor`` reports what workers would.
"""

import json
import shutil
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from schedtrace.record.traced import traced_class
from schedtrace.simulate import VirtualClock
from schedtrace.simulate.executor import SimulatedExecutor
from schedtrace.simulate.ranks import Ranks
from schedtrace.step_times.constants import Constants, HostTimes
from tests.contract.causes.toy_connectors import nothing
from tests.simulated import recorded_in

KV = {"kv_connector": "DelayedKV", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
TIMES = Constants(400, 20, 0, 0, HostTimes(100, 0, 0, 0, 100, 0))
END_US = 4_000_000.0
"""End of every recording: a request that the router loses holds blocks until then."""
PREFILLS, DECODES = "-aaaaaaa0", "-bbbbbbb1"
"""Suffixes that the front ends of the two engines add to the id of a request."""


@dataclass
class Wire:
    """Transfers between the engines, and when each is done."""

    clock: VirtualClock
    delay_us: float
    returned: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the connector returned for requests that were prefilled."""
    received: dict[str, float] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)
    """Begin of each transfer, by the request on the decode engine."""

    def begin(self, request_id: str, remote_request_id: str) -> None:
        self.begun[request_id] = self.clock.now_us
        self.received[request_id] = self.sent[remote_request_id] = self.clock.now_us + self.delay_us

    def taken(self, done: dict[str, float], requests: Any) -> set[str]:
        """Transfers of these requests that are done by now, each once."""
        ids = {name for name, us in done.items() if name in requests and us <= self.clock.now_us}
        for name in ids:
            del done[name]
        return ids


class DelayedKV(KVConnectorBase_V1, SupportsHMA):
    """Pulls all blocks of a prompt from the engine that prefilled it, as NIXL's does."""

    wire: Wire
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = nothing

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        tokens = request.num_prompt_tokens - computed if params.get("do_remote_prefill") else 0
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, _: Any, tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if tokens and params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            self.wire.begin(request.request_id, params["remote_request_id"])

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, *_: Any) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        self.wire.returned[request.request_id] = {
            "do_remote_prefill": True,
            "remote_engine_id": "engine-of-rank-0",
            "remote_request_id": request.request_id,
        }
        return True, self.wire.returned[request.request_id]


class TransferExecutor(SimulatedExecutor):
    """Reports transfers that are done with the output of each step."""

    def _launched(self, *arguments: Any) -> Any:
        return _WithTransfers(super()._launched(*arguments), self._clock.scheduler)

    def _empty(self, now_us: float) -> Any:
        return _WithTransfers(super()._empty(now_us + 100.0), self._clock.scheduler)


class _WithTransfers(Future):
    def __init__(self, output: Any, scheduler: Any) -> None:
        super().__init__()
        self._output_of_step, self._scheduler = output, scheduler

    def done(self) -> bool:
        return self._output_of_step.done()

    def result(self, timeout: float | None = None) -> Any:
        output = self._output_of_step.result(timeout)
        wire, requests = DelayedKV.wire, self._scheduler.requests
        recving, sending = wire.taken(wire.received, requests), wire.taken(wire.sent, requests)
        if recving or sending:
            if not output.req_ids:
                output = ModelRunnerOutput([], {}, [])
            output.kv_connector_output = KVConnectorOutput(finished_sending=sending, finished_recving=recving)
        return output


class Deployment:
    """A prefill engine, decode engines, and the router between them.

    Args:
        ranks: Engines; entered.
        wire: Transfers.
        handover_us: Time that the router takes from the prefill's output to the decode engine.
    """

    def __init__(self, ranks: Ranks, wire: Wire, handover_us: float) -> None:
        self.ranks, self.wire, self.handover_us = ranks, wire, handover_us
        self.params: dict[str, dict[str, Any]] = {}
        self.prompts: dict[str, int] = {}
        self.ended: dict[str, float] = {}
        """Time at which the last token of each request was back."""
        self.lost: set[str] = set()
        """Requests that the router loses after their prefill."""
        self.tokens = 2
        """Output tokens of each request."""
        ranks.finished = self._finished
        make = ranks.ranks[0].make_request

        def make_request(request_id: str, *arguments: Any, **options: Any) -> Any:
            request = make(request_id, *arguments, **options)
            request.kv_transfer_params = self.params.get(request_id)
            return request

        ranks.ranks[0].make_request = make_request

    def send(self, us: float, name: str, prompt: int) -> None:
        """Make a client send a request at that time."""
        request_id = f"cmpl-{name}-0{PREFILLS}"
        self.params[request_id] = {"do_remote_decode": True, "do_remote_prefill": False}
        self.prompts[request_id] = prompt
        self.ranks.arrive(us, request_id, prompt, 1, rank=0)

    def decode_alone(self, us: float, name: str, *, prompt: int, tokens: int) -> None:
        """Make a request arrive at the decode engine that is its own prefill engine."""
        self.ranks.arrive(us, name, prompt, tokens, rank=1)

    def _finished(self, request_id: str) -> None:
        self.ended[request_id] = self.ranks.clock.now_us
        if request_id in self.prompts and request_id not in self.lost:
            decode_id = request_id.replace(PREFILLS, DECODES)
            self.params[decode_id] = dict(self.wire.returned[request_id])
            at_us = self.ranks.clock.now_us + self.handover_us
            self.ranks.arrive(at_us, decode_id, self.prompts[request_id], self.tokens, rank=1)


def record(folder: Path, play: Any, monkeypatch: Any, *, delay_us: float, **options: Any) -> Deployment:
    """Record the engines of a deployment; ``play`` gets it before it runs.

    Each trace lies in ``FOLDER/host=<host>/engine-<rank>.jsonl``.
    """
    monkeypatch.setattr("schedtrace.simulate.ranks.SimulatedExecutor", TransferExecutor)
    engine = {"num_blocks": 600, "max_model_len": 4096, "max_num_batched_tokens": 4096} | options
    settings = {"data_parallel_size": 2, "lockstep": False, "times": TIMES, "kv_transfer_config": KV}
    run = folder / "run"
    with recorded_in(run), VirtualClock() as clock:
        wire = Wire(clock, delay_us)
        monkeypatch.setattr(DelayedKV, "wire", wire, raising=False)
        with Ranks(clock, traced_class, **settings, **engine) as ranks:
            deployment = Deployment(ranks, wire, handover_us=3_000.0)
            play(deployment)
            ranks.run(END_US)
    for rank, host in enumerate(("node-p", "node-d")):
        trace = folder / f"host={host}" / f"engine-{rank}.jsonl"
        trace.parent.mkdir(parents=True)
        (run / trace.name).rename(trace)
        change_header(trace, host=host)
    shutil.rmtree(run)
    return deployment


def change_header(trace: Path, **fields: Any) -> None:
    """Change fields in a trace's header."""
    header, _, rest = trace.read_bytes().partition(b"\n")
    trace.write_bytes(json.dumps(json.loads(header) | fields).encode() + b"\n" + rest)
