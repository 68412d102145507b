"""Hydra plugins for `python -m tiny_llm.train -m`: what they do is written in tiny_llm/sweeps/.

Hydra imports this room at every start, so the plugins import their work only when they are asked to do it.
"""
