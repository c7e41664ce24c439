"""Hosts on other machines: the same ``LocalHost`` there, behind an agent, and here what speaks with it.

``agent.Agent`` is what runs on a host, ``messages`` what crosses, ``remote.RemoteHost`` the agent's host as
the multiplexer sees it. Ray (an extra) carries the messages, in a child process (``driver``), and is known to
``membership`` alone. Imported by serve and cli only.
"""
