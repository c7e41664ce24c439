"""Folds over events and requests: metrics, access log, event log, feed, hooks, /healthz.

What is written here decides nothing. ``journal`` is the thread that writes; ``eventlog`` reads back as well.
"""
