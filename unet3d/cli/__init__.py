"""The command line: read arguments, print results, turn errors into exit codes."""
