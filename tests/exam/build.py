"""Write the run folder of every case: ``python -m tests.exam.build DIR [CASE ...]``.

``CASE`` is a name, or ``FOLDER=NAME:JSON``: the case with other options of its engine, into another folder.
"""

import gc
import json
import os
import re
import sys
import time
from pathlib import Path

# vLLM reads them when it is imported.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

from loguru import logger
from vllm.model_executor.models import registry

from tests.exam.cases import CASES, record

CHANGED = re.compile(r"(?P<folder>[^=]+)=(?P<name>[^:]+):(?P<changes>.+)")


def main(directory: Path, wanted: list[str]) -> None:
    """Record the wanted cases, or all; where vLLM refuses changed options, a file ``refused`` says so."""
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
