"""The ``vllm.general_plugins`` entry point, which vLLM loads first thing in each of its processes.

Nobody may have asked for anything: so this imports next to nothing, touches no scheduler, and says nothing
(``docs/recording.md``, "Installed and not asked").
"""

from schedtrace.record.switches import SWITCH, NotUnderstoodError, enabled, is_on


def register() -> None:
    """Listen, and record where that is asked for; with ``SCHEDTRACE=off`` do nothing. Never raise.

    vLLM calls this once per process, possibly more often: installing twice changes nothing.
    """
    try:
        if not is_on(SWITCH, default=True):
            return
        from schedtrace.record.live.dormant import listen_while_they_run

        listen_while_they_run()
        if enabled():
            from schedtrace.record.scheduler_choice import record_from_the_start

            record_from_the_start()
    except Exception as error:
        _say(error)


def _say(error: Exception) -> None:
    """Log why nothing is recorded, in one line."""
    from contextlib import suppress

    with suppress(Exception):
        from schedtrace.record.log import logger

        why = str(error) if isinstance(error, NotUnderstoodError) else repr(error)
        logger.warning("schedtrace: switched off, nobody can attach: {}", why)
