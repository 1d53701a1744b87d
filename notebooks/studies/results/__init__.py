"""The paper's results against ours: one page of what was found, each number from a record."""
