"""HOW a backend takes and leaves its GPUs, and whatever else touches one machine.

``seam`` is what others see of it: ``Host``, and the plain values that cross. ``local`` is this machine
behind it, and ``tests/test_seam.py`` says who may use what else.

``levels`` has the standby levels and their guarantee, ``containers`` and ``processes`` run
services, ``engines`` has what differs between what is inside, ``gpus`` and ``cuda_driver`` talk to the
cards. Every call may block: none is made under the multiplexer's lock.
"""
