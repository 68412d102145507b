"""Train small language models from scratch, synchronously or decentralized."""

__version__ = "0.1.0"
