"""The changes of a store, kept outside its process: a log, and the whole store from time to time."""
