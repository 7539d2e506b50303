"""TLS between the processes of a job: who shows which certificate, and what is encrypted."""
