"""A user's own training loop in the workers: `prepare`, `epochs`, `report` and `run`.

The function runs on a thread of its own in each worker's process. It and the worker's thread take turns (`turns`):
`session` is the worker's side, which hands over the batches of the worker's shares, and gradients to the engine, for
which the loop is one more model (`model`); `user_loop` is the function's side; `job_view` has what both know of the
job, and `loop_states` what another worker goes on with. What else there is has modules of its own, which ask a loop
for little: the `ticks` of schedulers, `losses`, what is gathered (`gatherer`, over `gathering`), and `standing_in`
meanwhile. `calls` has what the function calls, `run` what starts it.
"""
