"""How many machines a job needs."""
