"""Command line with one file per command: options, one library call, and a page printed in a format."""
