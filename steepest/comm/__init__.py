"""What carries messages: channels, frames, the wire, and the router of one process."""
