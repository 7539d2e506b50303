"""What parts of an exchange's state are called that are of rows of tables."""

#: gradients of rows that are not pushed yet
UNPUSHED = "rows"
