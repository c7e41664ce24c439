"""MAY a request be served now, WHEN is a swap worth it, WHOM to evict; pure.

Facts in, steps out: no lock, no clock, no I/O. ``GpuGroup`` is the state machine of the GPUs that backends
share, ``layout`` all of them, ``policy`` and ``eviction`` what may be plugged in, ``events`` what can be
observed. Called by the multiplexer under its lock, by the simulator from its loop and by the tests.
"""
