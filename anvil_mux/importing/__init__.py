"""The configuration of other programs -> a compose file for anvil-mux: llama-swap's file, Ollama's store.

Called by the commands. ``llama_swap.translate`` and ``ollama_store.translate`` give a ``Written``, whose text
is the file; whatever has no counterpart is a note in it, and nothing is left out without one.
"""
