"""The laboratory: what traffic comes to under other policies, in virtual time and at a running server.

What is asked for is a ``Workload`` (which model, for how long), a ``Trace`` of prompts (how long they are) or
a ``recording`` of a program that ran. ``simulate`` runs the scheduler on ``engines`` from a heap, and
``checker`` judges the log; ``fleet`` does the same for the routing. ``study`` and ``contest`` compare
policies. For a running server it becomes a ``Script``, a ``Player`` sends it, and ``Replay`` plays it at
servers in turns and holds it against its simulation. What comes of it all is told by ``report`` and ``plot``.

Only commands import it, when they are asked for.
"""
