"""Reading a store from outside of the process that writes it: flushed rows, or, by its log, the newest ones."""
