"""Proof on a user's own script that distribution and deaths change nothing: `steepest verify`,
`steepest.testing.verify`.

The script runs on processes of this machine: on all workers, on one, as the plain script, with workers that are
killed, and
stopped and resumed. In each process `probe` notes what the function does, step by step, as `records`, in which
tensors and the
user's variables are `summaries`. `runs` makes the runs, `comparing` finds the first step and name that differ
between two of
them, and `explaining` says why; `verifying` puts it together as a `report`.
"""
