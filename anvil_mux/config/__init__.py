"""Compose files with ``x-anvil`` -> one frozen ``Config``, with all problems at once; what changed between
two.

``config`` has the tables of settings and the dataclasses, ``loading`` reads the files, ``change`` compares.
Needs none of the packages that it configures: the registries of plug-ins are handed in (``plugins``).
"""
