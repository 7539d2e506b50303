"""The state of a running job: captured from its processes, kept, and installed in others."""
