"""The roles that act on what the protocol decides: server, worker, client, aggregator."""
