"""Which optimizers see the factors of an adapter: runs of many from several points of one orbit."""

from studies.audit.page import audit_page, drift_table
from studies.audit.study import Audited, AuditStudy, study_audit

__all__ = ["AuditStudy", "Audited", "audit_page", "drift_table", "study_audit"]
