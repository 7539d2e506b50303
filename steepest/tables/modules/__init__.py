"""What a model has of tables: modules that look rows up, and the model that finds them."""
