"""Measure zoos of models and rank them, for the studies `mnist` and `sentiment`."""
