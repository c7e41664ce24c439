"""Wire formats, pure: HTTP/1.1, and the routes, errors and bodies of each client API.

Bytes and dictionaries in, bytes and dictionaries out; nothing here knows a backend, a thread or a socket.
Anything may call it. Begin with ``http1`` (heads and framing), ``api`` (routes, error shapes) and
``completions`` (what engines answer, for the APIs that are translated: ``ollama``, ``anthropic``).
"""
