"""The Keras side: layers, id sets, the Batch Embedding Tensor, the train step, data readers."""
