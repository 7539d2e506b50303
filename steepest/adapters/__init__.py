"""Models, optimizers and data of other libraries: Keras, JAX with Flax and optax, Lightning, Hugging Face, tf.data."""
