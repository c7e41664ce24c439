"""HOW a backend takes and leaves its GPUs, and whatever else touches one machine.

``swap`` has the ways and their guarantee, ``containers`` and ``process`` run services, ``engine`` and
``control`` talk to what is inside, ``gpu`` and ``driver`` to the cards. Every call may block: none is made
under the multiplexer's lock.
"""
