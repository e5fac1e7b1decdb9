"""Conditions that guard data, changed one at a time: do the tests of their own room notice?"""
