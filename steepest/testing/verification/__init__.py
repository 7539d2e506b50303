"""Proof on a user's own script that distribution and deaths change nothing: `steepest verify`.

The script runs on processes of this machine: on all workers, on one, as the plain script, with workers that are
killed, and stopped and resumed. In each process `probe` notes what the function does, step by step, as `records`,
in which tensors and the user's variables are `summaries`. `runs` makes the runs, `jobs` those of a model creator;
`comparing` finds the first step and name that differ between two of them, `explaining` says why, and `verifying`
puts it together as a `report`.
"""
