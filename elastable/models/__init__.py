"""A model on its way: where its tables go, what was not trained, saving it."""
