"""Write the run folder of every case: ``python -m tests.exam.build DIR [CASE ...]``.

``CASE`` is a name, or ``FOLDER=NAME:JSON``: the case with other options of its engine, into another folder.
"""

import gc
import json
import re
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

from loguru import logger

from tests.exam.cases import CASES, record

CHANGED = re.compile(r"(?P<folder>[^=]+)=(?P<name>[^:]+):(?P<changes>.+)")


def forked(directory: Path, wanted: Sequence[str] = ()) -> ForkProcess:
    """Begin ``main`` in a fork of this process: to import vLLM takes as long as to record all cases.

    The plugin's hooks stay in the fork. Polars must not be used there: its threads are not.
    """
    process = get_context("fork").Process(target=_in_fork, args=(directory, wanted))
    process.start()
    return process


def _in_fork(directory: Path, wanted: Sequence[str]) -> None:
    from vllm import plugins

    plugins.plugins_loaded = False  # they were loaded while recording was off, or not at all
    main(directory, wanted)


def main(directory: Path, wanted: Sequence[str]) -> None:
    """Record the wanted cases, or all; where vLLM refuses changed options, a file ``refused`` says so."""
    from vllm.model_executor.models import registry

    logger.disable("schedtrace")
    gc.freeze()  # or every full collection goes through all of vLLM
    registry._run_in_subprocess = lambda look: look()  # at a model's class: that would import vLLM again
    for one in wanted or CASES:
        began = time.perf_counter()
        changed = CHANGED.fullmatch(one)
        name, folder = (changed["name"], changed["folder"]) if changed else (one, one)
        try:
            record(CASES[name], directory / folder, **(json.loads(changed["changes"]) if changed else {}))
        except (ValueError, AssertionError, RuntimeError) as error:
            if not changed:
                raise
            (directory / folder).mkdir(parents=True, exist_ok=True)
            (directory / folder / "refused").write_text(str(error))
        print(f"{folder}: {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["--help"]):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
