"""Client bytes <-> engine bytes, in one direction.

    accept (server) -> parse head (client) -> route (access) -> local answer (local)
                                                             or model name (questions) -> lease (dispatch)
        -> forward (forward) -> relay (relay, pump) -> record (handler)

``serve`` builds a ``Server`` around a ``Handler``. One request has three objects: what was asked (``Asked``
and ``Question``, immutable), the writer of its answer (``Reply``), and its record for the log.
"""
