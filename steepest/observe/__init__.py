"""What a user sees of a run: results, callbacks, the progress bar."""
