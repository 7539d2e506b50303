"""Local SGD and the simple reference as strategies, and all strategies by name."""
