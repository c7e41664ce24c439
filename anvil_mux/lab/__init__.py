"""The laboratory: it measures the program and looks for faults in it, and is no part of what serves."""
