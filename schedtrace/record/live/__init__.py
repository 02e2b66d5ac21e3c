"""Code that acts on a running engine: its socket, attachments, the watchdog, the flight recorder."""
