"""Whether training on the quotient is any good: adapters trained by seven optimizers, and the kinds of SAM."""
