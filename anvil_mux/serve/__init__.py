"""The life of one anvil-mux: build, adopt, serve, leave.

``program`` puts the parts together; beside it is what only a running program needs: signals, systemd, what
was learned, figures read of engines, replicas shared with others, how commands find it.
"""
