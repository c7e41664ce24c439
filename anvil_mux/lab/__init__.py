"""The laboratory: what traffic comes to under other policies, in virtual time and at a running server.

``simulate`` runs the scheduler, its policies and the routing from a heap, and checks the log; ``workload``
says who asks for what, ``study`` and ``contest`` compare, and ``recording`` makes a workload of an event log.
A ``Script`` is what a running server is sent, ``Player`` who sends it, and ``Replay`` plays scripts at
servers in turns and holds them against their simulation. Only commands import it, when they are asked for.
"""
