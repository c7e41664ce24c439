"""Compose files with ``x-anvil`` -> one frozen ``Config``, with all problems at once; what changed between
two.

``config`` and ``table`` have the dataclasses and the settings, ``loading`` reads the files, ``backends``
their services, ``candidates`` says where these may run, ``change`` compares.
Needs none of the packages that it configures: ``anvil_mux.plugins`` knows the policies, and has ``load``.
"""
