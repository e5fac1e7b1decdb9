"""Published graphs, downloaded, checked and written as folders that `load_graph` reads."""
