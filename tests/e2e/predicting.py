"""Predictions in one process: ``python predicting.py '[[FOLDER, CHANGES], ...]' FILE`` writes them to it."""

import json
import sys
from pathlib import Path

import msgspec

from schedtrace.read.run import read_run
from schedtrace.whatif.prediction import predict, recorded_load


def main(wanted: str, file: str) -> None:
    """Write the predictions, in this order."""
    made = [
        predict(recorded_load(read_run(Path(folder))), changes, resamples=0)
        for folder, changes in json.loads(wanted)
    ]
    Path(file).write_bytes(msgspec.json.encode(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
