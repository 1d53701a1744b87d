"""How far optimizers started at different points of one orbit drift apart."""

from __future__ import annotations

from studies.audit.study import AuditStudy, load, run, tables

__all__ = ["AuditStudy", "load", "run", "tables"]
