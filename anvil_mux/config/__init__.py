"""Compose files with ``x-anvil`` -> one frozen ``Config``, with all problems at once; what changed between
two.

What is read: ``config`` has the records, whose fields are the settings; ``kinds`` says what a setting is,
reads values and gives their JSON Schema; ``values`` and ``machines`` have the larger ones.

How: ``loading`` tells the whole story, and at its end checks all together. ``interpolate`` reads a file,
``compose`` has the Compose program take several together, ``reading`` reads ``x-anvil`` and collects what is
wrong (each a ``kinds.Diagnostic``). ``backends`` makes a backend of each service and place: ``service`` knows
what a compose service says, ``abilities`` what its engine can do and what to warn of, ``placement`` where it
may run, and ``compose`` describes it anew there.

Beside that, ``change`` compares two configurations, and ``keys`` reads API keys.

Needs none of the packages that it configures: ``anvil_mux.plugins`` knows the policies, and has ``load``.
"""
