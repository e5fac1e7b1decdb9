"""Races against other libraries, each in an environment and a process of its own.

make bench-peers        # installs the peers below .peers/ and races them
"""
