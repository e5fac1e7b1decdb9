"""Every figure that the README quotes, with the peers measured beside it in the same run."""
