"""How long a step would take on other numbers of workers and other links, before there are any."""
