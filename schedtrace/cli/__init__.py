"""The command line: options to one library call to one page, printed in a format; one file per command."""
