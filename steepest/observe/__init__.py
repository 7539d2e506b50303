"""A user's view of a run: results, callbacks, the progress bar."""
