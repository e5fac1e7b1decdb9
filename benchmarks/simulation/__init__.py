"""Jobs larger than one machine, simulated with service times that were measured."""
