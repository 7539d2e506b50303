"""The names of the library's strategies, in the order in which they are shown."""

# apart, since the command line lists them before torch is imported
STRATEGY_NAMES = ("simple", "ps", "allreduce", "local", "async", "ssp")
