"""Partitioners: pure functions that cut a list of layers into stages."""
