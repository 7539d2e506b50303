"""A user's own training loop in the workers: `prepare`, `epochs`, `report` and `run`.

The function runs on a thread of its own in each worker's process. It and the worker's thread take turns (`turns`): a
`session` hands it the batches of the worker's shares, and its gradients to the engine, for which it is one more model
(`model`). What else there is between the two has modules of its own, which ask a session for little: the `ticks` of
schedulers, `losses`, what is gathered (`gatherer`, over `gathering`), and `standing_in` meanwhile. `calls` has what
the function calls, `run` what starts it.
"""
