"""The two ways of a host embedding's rows: parts in replicas' own memory, or callbacks to a store."""
