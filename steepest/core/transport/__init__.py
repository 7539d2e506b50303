"""How bytes travel between processes: frames, channels, sockets, the router."""
