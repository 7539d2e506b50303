"""Ray's workers as forks of a process that has imported what they use. It imports Ray in that process alone."""
