"""Commands that look after a store while no job has it."""
