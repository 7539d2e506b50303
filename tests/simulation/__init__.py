"""The whole trainer in one process, on virtual time, with a stand-in for Ray."""
