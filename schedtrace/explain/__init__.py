"""One step or one request, explained."""
