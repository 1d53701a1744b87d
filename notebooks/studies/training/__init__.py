"""Whether training on the quotient is any good: adapters of every optimizer, and four kinds of SAM."""
