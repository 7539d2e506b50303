"""Local SGD: workers with an optimizer of their own, who push what several of its updates have changed."""
