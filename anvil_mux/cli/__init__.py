"""The commands. ``main`` has the table; each command is a function that returns an exit code."""
