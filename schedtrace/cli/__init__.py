"""The command line: options to one library call to a presenter; one command a file."""
