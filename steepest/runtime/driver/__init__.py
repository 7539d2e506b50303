"""The driver's side of a user's calls: steps, `fit`, checkpoints that it keeps, figures."""
