"""Gradients of a version, of rows and of dense variables: summed and measured, wherever they are."""
