"""Traffic that is played against a running server, its own anvil-mux or any OpenAI-compatible one.

``Script`` is what is sent, ``Player`` who sends it, ``LiveRun`` what came of it; ``Replay`` plays scripts at
servers in turns and holds them against their simulation. Called by the command ``replay`` only.
"""
