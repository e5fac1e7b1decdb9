"""Dense replay: tables whose rows also take the steps in which they had no gradient (`lazy=False`)."""
