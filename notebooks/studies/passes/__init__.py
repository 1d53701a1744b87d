"""How many passes an ascent needs for the maximum: Auto-PGD, limited-memory BFGS, and the released ascent."""
