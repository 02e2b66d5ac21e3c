"""The ``vllm.general_plugins`` entry point, which vLLM loads first thing in each of its processes.

The user may not have asked for a recording. So this imports very little, touches no scheduler, and logs
nothing (``docs/recording.md``, "Installed but idle").
"""

from schedtrace.record.switches import METRICS, SWITCH, NotUnderstoodError, enabled, environment_value, is_on


def register() -> None:
    """Listen, and record if the environment asks for it; do nothing with ``SCHEDTRACE=off``. Never raise.

    vLLM calls this once per process, or more often; a second installation changes nothing.
    """
    try:
        if not is_on(SWITCH, default=True):
            return
        from schedtrace.record.live.dormant import listen_while_they_run

        listen_while_they_run()
        if enabled():
            from schedtrace.record.scheduler_choice import record_from_the_start

            record_from_the_start()
        if "spans=" in environment_value(METRICS):
            from schedtrace.record.otel.parents import choose_span_ids

            choose_span_ids()
    except Exception as error:
        _say(error)


def _say(error: Exception) -> None:
    """Log in one line why nothing is recorded."""
    from contextlib import suppress

    with suppress(Exception):
        from schedtrace.record.log import logger

        why = str(error) if isinstance(error, NotUnderstoodError) else repr(error)
        logger.warning("schedtrace: switched off, nobody can attach: {}", why)
