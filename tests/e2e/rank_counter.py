"""A vLLM plugin that counts what the engine core of a rank does, without schedtrace.

Each ``schedule()`` is preceded by vLLM's question whether to throttle prefills; each dummy batch goes to the
executor. For both, a line with wave and step counter is written to ``$COUNTED.<rank>``.
"""

import os


def register():
    """Entry point of ``vllm.general_plugins``."""
    from vllm.v1.engine.core import DPEngineCoreProc
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    if hasattr(DPEngineCoreProc, "counted"):
        return
    DPEngineCoreProc.counted = None
    run, throttle = DPEngineCoreProc.run_busy_loop, DPEngineCoreProc._should_throttle_prefills

    def note(kind):
        engine = DPEngineCoreProc.counted
        with open(f"{os.environ['COUNTED']}.{engine.dp_rank}", "a") as file:  # noqa: PTH123  # plain, and in the engine
            file.write(f"{kind} {engine.current_wave} {engine.step_counter}\n")

    def run_busy_loop(self):
        DPEngineCoreProc.counted = self
        run(self)

    def should_throttle_prefills(self):
        note("schedule")
        return throttle(self)

    DPEngineCoreProc.run_busy_loop = run_busy_loop
    DPEngineCoreProc._should_throttle_prefills = should_throttle_prefills

    def counting(execute):
        def execute_dummy_batch(self):
            note("dummy")
            execute(self)

        return execute_dummy_batch

    for owner in (Executor, MultiprocExecutor):
        owner.execute_dummy_batch = counting(owner.execute_dummy_batch)
