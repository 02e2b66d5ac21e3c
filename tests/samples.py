"""Reports of the recorded samples of findings, each made once for all workers of a test run."""

import os
import pickle
from pathlib import Path

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.model.report import RunReport
from schedtrace.read.run import read_run

FINDINGS = Path(__file__).parent / "data" / "findings"


class Samples:
    """Call it with a finding's code, and with ``near-miss`` for the other sample.

    Args:
        folder: Shared by the workers; exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, code: str, name: str = "shows") -> RunReport:
        """A report of the caller's own."""
        kept = self._folder / f"{code}-{name}.pickle"
        if kept.exists():
            return pickle.loads(kept.read_bytes())  # type: ignore[no-any-return]  # noqa: S301  # of this test run
        report = analyze_run(read_run(FINDINGS / code / name))
        beside = kept.with_suffix(f".{os.getpid()}")
        beside.write_bytes(pickle.dumps(report))
        beside.replace(kept)
        return report
