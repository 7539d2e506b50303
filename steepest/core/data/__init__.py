"""Training data: sources of batches, and the plan that says which worker reads which samples."""
