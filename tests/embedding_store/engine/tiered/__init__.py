"""Stores with a tier behind them: who writes, and when."""
