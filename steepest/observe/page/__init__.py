"""One page of a job: what its history tells, as charts and tables, in a file or live."""
