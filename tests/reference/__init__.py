"""A float64 NumPy reading of the model and of the decode rule, sharing no code with the package under test."""
