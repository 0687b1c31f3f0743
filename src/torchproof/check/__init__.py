"""Runs a model on its own samples and audits what it does."""

from torchproof.check.audit import Audit, audit

__all__ = ["Audit", "audit"]
