"""Virtual time: the scheduler, its policies and the routing driven from a heap, and what comes of it.

``simulate`` runs and checks, ``workload`` says who asks for what, ``study`` and ``contest`` compare,
``replay`` makes a workload of an event log. Serving never imports it.
"""
