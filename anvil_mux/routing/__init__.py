"""WHERE among the replicas of one model a request goes; pure.

``routing`` has the steps (metrics, filters, selectors), ``pipeline`` makes policies of YAML, ``in_flight``
knows what each replica has to do, ``prefix`` what its cache holds. Called by the scheduler and by
the simulated replicas.
"""
