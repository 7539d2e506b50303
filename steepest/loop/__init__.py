"""A user's own training loop in the workers: `prepare`, `epochs`, `report` and `run`.

The function runs on a thread of its own in each worker's process. It and the worker's thread take turns (`turns`):
`session` is the worker's side, which asks the function for a step and hands its gradients to the engine, for which
the loop is one more model (`model`); `user_loop` is the function's side; `job_view` has what both know of the job.

Where workers wait for each other the loop goes through the batches by itself: `cursor` says where it is and which
batch comes next, and `sum_weights` what it weighs in a sum of gradients. Under `"local"`, `"async"` and the like
the engine hands over a worker's own batches, and `ticks` counts schedulers' steps there. `step_weights` is what
the batches of a step weigh, `loss_looks` tells losses that are no mean of these.

`loop_states` is what another worker goes on with, `entry` how it comes to where that is of; `counting` has
`enumerate` and `zip` count the batches that it passes by. `gatherer`, over `gathering`, is what workers give each
other; `loop_reports` numbers reports by their place. `calls` has what the function calls, `run` what starts it.
"""
