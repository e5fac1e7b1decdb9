"""Tables whose rows follow steps without a gradient, too (`lazy=False`)."""
