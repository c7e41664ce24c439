"""Compose files with ``x-anvil`` -> one frozen ``Config``, with all problems at once; what changed between
two.

``config`` and ``table`` have the dataclasses and the settings, ``loading`` reads the files, ``backends``
their services, ``candidates`` says where these may run, ``change`` compares.
Needs none of the packages that it configures: the registries of plug-ins are handed in (``plugins``).
"""
