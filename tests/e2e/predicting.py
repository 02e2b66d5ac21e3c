"""Predictions in one process: ``python predicting.py '[[FOLDER, CHANGES], ...]'`` prints a line for each."""

import json
import sys
from pathlib import Path

import msgspec

from schedtrace.read.run import read_run
from schedtrace.whatif.prediction import predict, recorded


def main(wanted: str) -> None:
    """Print the predictions, in this order."""
    for folder, changes in json.loads(wanted):
        prediction = predict(recorded(read_run(Path(folder))), changes, resamples=0)
        print(msgspec.json.encode(prediction).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
