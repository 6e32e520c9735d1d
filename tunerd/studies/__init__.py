"""Many runs, or an artifact beside others: bench, profile, compare, matrix, recipes."""
