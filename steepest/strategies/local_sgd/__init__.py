"""Local SGD: workers with an optimizer of their own push the sum of several of its updates."""
