"""What becomes of a job when its processes change: decided from what is known of them, without Ray."""
