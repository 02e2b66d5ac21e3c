"""``schedtrace detach``: end a recording that was attached."""

from schedtrace.cli.attach import EngineArgument
from schedtrace.cli.options import print_line


def detach(engine: EngineArgument = None) -> None:
    """End the recording of an engine that was attached to."""
    from schedtrace.engine.running_recordings import detach_from

    for line in detach_from(engine):
        print_line(line)
