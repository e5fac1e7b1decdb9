"""The sizes of the click model, importable without TensorFlow."""

FEATURES = 26
DIM = 16
HIDDEN = (256, 128)
BATCH = 2_048
LEARNING_RATE = 0.01
OPTIMIZERS = ("SGD", "Adagrad", "Adam")
