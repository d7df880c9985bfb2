"""Products with weights that are codes: `api.codebook_matmul` and its kin."""
