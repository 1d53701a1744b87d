"""How much of the fibre of small models is found: of model types of Hugging Face, and of models written by hand."""

from studies.fibres.page import fibre_table, fibres_page
from studies.fibres.study import Fibres, Row, study_fibres

__all__ = ["Fibres", "Row", "fibre_table", "fibres_page", "study_fibres"]
