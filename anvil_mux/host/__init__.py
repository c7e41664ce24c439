"""HOW a backend takes and leaves its GPUs, and whatever else touches one machine.

``seam`` is what others see of it: ``Host``, and the plain values that cross. ``local`` is this machine behind
it, and ``tests/test_seam.py`` says who may use what else.

``ways`` has the standby levels and ``swap`` their guarantee, ``containers`` and ``process`` run services,
``engine_client`` and ``control`` talk to what is inside, ``gpu`` and ``driver`` to the cards. Every call may
block: none is made under the multiplexer's lock.
"""
