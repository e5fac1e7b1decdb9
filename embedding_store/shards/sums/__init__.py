"""Gradients of a version, of rows: summed and measured, wherever they are."""
