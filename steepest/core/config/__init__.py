"""A user's choices: strategies, compression, how a job is run; each validated when it is made."""
