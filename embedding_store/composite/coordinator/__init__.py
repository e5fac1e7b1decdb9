"""Several stores at one version: commits, recovery, snapshots and reads over all of them."""
