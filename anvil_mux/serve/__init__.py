"""The life of one anvil-mux: build, adopt, serve, reload, leave.

``program`` tells it in order; ``building`` makes the parts, in the same order as they are named here.
``invocation`` is what ties the program to whoever started it, ``files`` are those that it reads and keeps,
``hosts`` and ``watches`` what it has hosts do and hears of them, ``polling`` what it asks servers again and
again. ``remote`` is a running anvil-mux as commands see it.
"""
