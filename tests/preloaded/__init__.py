"""Python processes forked from one that has imported all they need, so that each starts in a tenth of a second."""
