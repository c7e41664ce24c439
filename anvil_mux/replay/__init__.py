"""Traffic that is played against a running server, its own anvil-mux or any OpenAI-compatible one.

``Script`` is what is sent, ``Player`` who sends it, ``LiveRun`` what came of it; compared.py holds that
against the simulation of the same script. Called by the command ``replay`` only.
"""
