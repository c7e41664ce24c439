"""MAY a request be served now, WHEN is a swap worth it, WHOM to evict; pure.

Facts in, effects out: no lock, no clock, no I/O. ``Scheduler`` takes the facts, ``GpuGroup`` decides for the
GPUs that backends share, ``Layout`` knows where each backend and each queue is; policies and evictions may be
plugged in. Called by the multiplexer under its lock, by the simulator from its loop and by the tests.
"""
