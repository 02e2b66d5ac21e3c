"""Engine that runs: its socket and what is asked over it, attachments, the watchdog, the flight recorder."""
