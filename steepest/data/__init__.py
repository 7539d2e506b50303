"""Training data of Ray and of Spark, and what tells one data set from another."""
