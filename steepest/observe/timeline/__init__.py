"""The timeline of a job: what each process did, and when, as a file for Perfetto, and what it says."""
