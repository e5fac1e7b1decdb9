"""Which store each table goes to, and the stores of several places as one."""
