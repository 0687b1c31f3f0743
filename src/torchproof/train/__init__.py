"""Trains a Recipe: one process, DDP or FSDP, resumable at every step."""
