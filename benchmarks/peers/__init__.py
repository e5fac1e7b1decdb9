"""Comparisons with other libraries, each in a separate environment and process.

make bench-peers        # installs the peers in .peers/ and measures them
"""
