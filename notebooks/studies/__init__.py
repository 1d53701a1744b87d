"""Study the paper's claims: data, training, measuring, and the records they leave, in the order a reader meets them."""
