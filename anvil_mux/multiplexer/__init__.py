"""One lock around the scheduler; leases; and the threads that perform steps.

``multiplexer.Multiplexer`` is what the proxy leases from, ``Lease`` a request's hold on a backend;
``driver.SchedulerDriver`` has the lock, and what holds around the scheduler. Called by the proxy and by
serve; steps are performed on the ``Host`` that is handed to it.
"""
