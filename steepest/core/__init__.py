"""The roles of a job that trains dense models, and what they say to each other; all of the package stands on it.

`engine` has the roles: coordinator, servers, workers and the driver's client, and `engine.hosting` what puts them
into processes. The packages in here import nothing else of steepest but its errors and checks.
"""
