"""anvil-mux: one address for many models."""

__version__ = "0.1.0"
