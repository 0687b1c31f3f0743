"""Measures in fresh processes, candidate and baseline in turns."""
