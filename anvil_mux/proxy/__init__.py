"""Client bytes <-> engine bytes, in one direction.

    accept (server) -> parse head (client) -> rights (access) -> local answer (local)
                                                              or question (question) -> lease (dispatch)
        -> attempt (attempt) -> exchange (exchange, pump, tunnel) -> reply (reply) -> record (handler)

``serve`` builds a ``Server`` around a ``Handler``. One request has three objects: what was asked
(``RequestContext`` and ``Question``, never altered), the writer of its answer (``Reply``), and its record for
the log.
"""
