"""Hosts on other machines: the same ``LocalHost`` there, behind an agent, and here what speaks with it.

``agent.Agent`` is what runs on a host, ``frames`` what crosses, ``remote.RemoteHost`` the agent's host as the
multiplexer sees it, ``cluster.Cluster`` all of them. Calls leave through a child process (``channel``): one
that Ray (an extra) reaches the agents by (``ray_link``), or each a host that is simulated. Imported by serve
and cli only.
"""
