"""Python processes forked from one that has imported TensorFlow, so that each starts in a tenth of a second."""
