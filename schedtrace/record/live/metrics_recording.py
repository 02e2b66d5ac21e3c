"""Metrics of an engine: computed by the current recording or, if there is none, by one for metrics alone.

Metrics are in one of three states: off, without a receiver; counted by another recording, which has the
receiver; counted by a recording for metrics alone, which ends before a client's recording begins and returns
after it.
"""

from pathlib import Path
from typing import Any

from schedtrace.record.disguise import RECORDERS
from schedtrace.record.live.between_steps import BetweenSteps
from schedtrace.record.live.class_swap import MOST_WAITED_S, ClassSwap, RefusedError
from schedtrace.record.log import logger
from schedtrace.record.metrics.measuring import Meter
from schedtrace.record.settings import Settings, hides_ids


class MetricsRecording:
    """Recording of one engine for metrics alone.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: Access to the engine's thread.
    """

    def __init__(self, engine: Any, between_steps: BetweenSteps) -> None:
        self._engine, self._between_steps = engine, between_steps
        self.meter: Meter | None = None
        """Receiver of the totals of every recording; None if metrics are off."""
        self.swap: ClassSwap | None = None
        """Class swap of the recording for metrics alone; None without such a recording."""
        self._makes_spans = False
        """Whether that recording makes lines, which spans need."""

    def switch_on(self, meter: Meter) -> float:
        """Send the totals to a receiver; return the microseconds for which the engine was held up.

        Raises:
            RefusedError: If the engine cannot be recorded, or does not reach the end of its step.
        """
        held_us = self._begin(meter)
        self.meter = meter
        return held_us

    def switch_off(self) -> float:
        """Stop counting; return the microseconds for which the engine was held up.

        Raises:
            RefusedError: If the engine does not reach the end of its step.
        """
        held_us = self.pause_metering()
        self.meter = None
        if (recorder := RECORDERS.look_up(self._engine.scheduler)) is not None:
            recorder.writer.measuring.meter = None
        return held_us

    def pause_metering(self) -> float:
        """End the recording for metrics alone; return the microseconds for which the engine was held up.

        Raises:
            RefusedError: If the engine does not reach the end of its step.
        """
        swap = self.swap
        if swap is None:
            return 0.0
        held_us = swap.undo(MOST_WAITED_S)
        self.swap = None
        swap.close()
        return held_us

    def resume_metering(self) -> None:
        """Count again after another recording has ended; never raise an error."""
        if self.meter is None:
            return
        try:
            self._begin(self.meter)
        except RefusedError as error:
            logger.warning("schedtrace: metrics stand still: {}", error)

    def _begin(self, meter: Meter) -> float:
        """Record for the receiver unless an active recording can serve it; return the hold-up in us."""
        recorder = RECORDERS.look_up(self._engine.scheduler)
        makes_spans = meter.histories is not None
        suits = self.swap is None or (meter is self.meter and makes_spans == self._makes_spans)
        if recorder is not None and recorder.active and suits:
            recorder.writer.measuring.meter = meter
            return 0.0
        self.pause_metering()  # it has given up, counts for another receiver, or with or without lines
        self._makes_spans = makes_spans
        chosen = Settings(
            Path(), trial_ids=False, hash_ids=hides_ids(), keeps_lines=False, makes_spans=makes_spans
        )
        swap = ClassSwap(self._engine, self._between_steps, chosen)
        swap.recorder.writer.measuring.meter = meter
        held_us = swap.begin(MOST_WAITED_S).held_us
        self.swap = swap
        return held_us
