"""What replicas share with each other, without a master: tables, variables, knowledge graphs."""
