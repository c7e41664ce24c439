"""The demo: a stand-in for an inference engine, run as a program of its own."""
