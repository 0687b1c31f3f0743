"""Runs a bundle's decision, or a bare target, behind HTTP; refuses what differs from the golden set.

``app``, ``server``, ``model`` and ``threads`` import no torch: the server listens, and health is answered, while torch
and the model still load on the model's thread.
"""
