"""Share what the studies of zoos have in common: which measures they take, their page, their record."""
